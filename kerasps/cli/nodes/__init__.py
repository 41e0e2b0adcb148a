"""The nodes of `kerasps run`: their role, and what it asks of them.

Contract: a node sees no process of another one. `role` finds out which task it is without starting
anything.
"""
