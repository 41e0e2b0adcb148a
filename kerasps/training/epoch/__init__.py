"""The state of an epoch: the steps of each worker, the counted steps, the position of each split.

Contract: events in, commands out. The caller holds one lock. The state machine uses no threads and
no TensorFlow.
"""
