"""Small records for all modules of the step: packed messages, maps by identity, specs, modes.

Contract: holds data and knows no phase.
"""
