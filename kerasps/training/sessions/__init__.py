"""Runs executions on workers, and recovers from the loss of one.

Contract: each session belongs to one worker and one thread. It sends what the epoch's state says,
and tells the state how that ended.
"""
