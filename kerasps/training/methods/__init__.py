"""The methods of a model: `fit`, `evaluate`, `predict`, and those for one batch.

Contract: each replaces a method of Keras, takes its arguments, and returns the same.
"""
