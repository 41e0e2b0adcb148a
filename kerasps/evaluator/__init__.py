"""A process beside the training, which evaluates its checkpoints as they appear.

Contract: it connects to no task and shares nothing with the training but a directory, or a pipe
    that says when it ends.
"""
