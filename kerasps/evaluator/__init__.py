"""A process that evaluates the checkpoints of a training as they appear.

Contract: it connects to no task. It shares only a directory with the training, and a pipe if
`kerasps launch` starts both.
"""
