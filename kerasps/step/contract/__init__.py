"""What the phases of a step agree on: the variables that it touches, and what enters and leaves it.

Contract: records that a trace fills and that the other phases read.
"""
