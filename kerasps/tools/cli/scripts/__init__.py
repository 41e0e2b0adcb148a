"""Starts, ends and restarts processes of the user's script.

Contract: `run_state` decides what happens after a death, and handles no processes.
"""
