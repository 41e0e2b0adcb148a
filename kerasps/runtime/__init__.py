"""Wraps TensorFlow's distributed runtime, with one way to do each thing.

Contract: the modules call a task, fetch a value from one, or explain why that failed. They know
addresses and device names, but not clusters or models. A task's server imports some of these
modules, so this `__init__` imports none: import the module that you need.
"""
