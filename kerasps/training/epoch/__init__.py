"""The state of an epoch: which steps workers have, which are counted, and where each split stands.

Contract: events in, commands out, under one lock of the caller; no threads and no TensorFlow in the
state machine itself.
"""
