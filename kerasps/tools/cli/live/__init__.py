"""Commands that look at a running training from another process: they show it and trace it.

Contract: they ask a run by its socket, its address or its tasks, and change nothing in it.
"""
