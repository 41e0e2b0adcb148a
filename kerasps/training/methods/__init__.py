"""The methods of a model: `fit`, `evaluate`, `predict`, and those for one batch.

Contract: each takes the arguments of the method of Keras that it stands in for, and returns what
that returns.
"""
