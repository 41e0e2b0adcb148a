"""The rows by key that one ps holds of a pool, and the index that finds them.

Contract: adds operations to functions on a ps. Knows no Keras variables.
"""
