"""Small records that all of the step uses: packed messages, maps by identity, specs, modes.

Contract: holds data and knows no phase.
"""
