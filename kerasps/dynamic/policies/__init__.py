"""The rules by which ids get and lose rows on a ps: admission, eviction, and the use of rows.

Contract: adds operations to functions on a ps, given a part by its protocol. Knows no indexes and
no Keras variables.
"""
