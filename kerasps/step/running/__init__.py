"""A step that is traced, as the training calls it: its graphs, its executions and their results.

Contract: what `training/` gets of a step is here.
"""
