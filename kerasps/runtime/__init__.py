"""TensorFlow's distributed runtime, as the package uses it: one way of doing each thing.

Contract: everything here calls a task, brings a value from one, or explains why that failed. It
knows addresses and device names, and neither clusters nor models. A task's server imports some of
these modules, so this door imports none: name the module that you need.
"""
