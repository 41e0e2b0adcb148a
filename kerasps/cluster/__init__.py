"""Describes, starts, reaches and ends the processes of a cluster, and translates their errors.

Contract: everything here speaks of tasks (chief, worker, ps) by job and index, and knows nothing of
models. A task's server imports this wing, so the wing imports its modules when a name is first
used. A server that starts without TensorFlow's Python packages is ready in half a second.
"""
