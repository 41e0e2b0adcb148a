"""Connects this process to the tasks, and keeps the variables and datasets that it made before.

Contract: the only code that changes TensorFlow's server definition of this process.
"""
