"""Processes of the user's script: started, ended, started again.

Contract: what is to be done when something dies is decided without processes, in `run_state`.
"""
