"""The server of a task: the address and port at which it listens, and its coordinator.

Contract: runs in the task's process, without Keras, and knows its own task only.
"""
