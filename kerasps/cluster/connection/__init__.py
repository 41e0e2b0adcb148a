"""Connects this process to the tasks, and keeps the variables and datasets that it made before.

Contract: no other code changes TensorFlow's server definition of this process.
"""
