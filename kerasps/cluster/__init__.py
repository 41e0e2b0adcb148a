"""Describes, starts, reaches and ends the processes of a cluster, and translates their errors.

Contract: all modules refer to tasks (chief, worker, ps) by job and index, and know nothing of
models. A task's server imports modules of this wing, so this `__init__` imports none: a server that
starts without TensorFlow's Python packages is ready in half a second.
"""
