"""The layout of small variables while steps run: end to end on a ps, or all on one ps.

Contract: decides where a value is held during a `fit`, and copies it there and back.
"""
