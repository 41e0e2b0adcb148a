"""Turns a model's method into step graphs: traces it, plans messages, builds graphs.

Contract: runs once for each signature of a step, in the thread that calls `fit`.
"""
