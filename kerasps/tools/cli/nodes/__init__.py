"""The nodes of `kerasps run`: their roles, and the functions that run each role.

Contract: a node sees no process of another node. `role` finds the task of this node without
starting anything.
"""
