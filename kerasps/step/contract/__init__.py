"""Records that the phases of a step share: its variables, its inputs and its outputs.

Contract: a trace fills the records; the phases read them.
"""
