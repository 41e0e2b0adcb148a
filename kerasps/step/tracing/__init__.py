"""From a model's method to step graphs: traces the method, plans messages, builds graphs.

Contract: runs once for each signature of a step, in the thread that calls `fit`.
"""
