"""Functions that users schedule on the coordinator, and what happens when a worker is lost.

Contract: stands in for parts of TensorFlow's coordinator; a call that a worker was lost with is
made again, and changes each ps once.
"""
