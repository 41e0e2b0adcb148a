"""The server of a task: its address and port, and the watch on its coordinator.

Contract: runs in the task's process, without Keras, and knows only this task.
"""
