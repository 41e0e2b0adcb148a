"""A traced step as `training/` calls it: its graphs, its executions and their results.

Contract: `training/` calls the step through the modules of this room.
"""
