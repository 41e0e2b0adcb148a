"""What one ps holds of a pool: rows by key, and the index that finds them.

Contract: adds operations to functions on a ps. Knows no Keras variables.
"""
