"""Records that the phases of a step share: its variables, and what enters and leaves it.

Contract: records that a trace fills and that the other phases read.
"""
