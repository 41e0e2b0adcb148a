"""Functions that users schedule on the coordinator, and recovery when a worker is lost.

Contract: replaces parts of TensorFlow's coordinator. When a worker is lost, its call is retried,
and changes each ps once.
"""
