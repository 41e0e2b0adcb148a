"""How a task's server listens: at which address, on which port, and for which coordinator.

Contract: runs in the task's process, without Keras, and knows its own task only.
"""
