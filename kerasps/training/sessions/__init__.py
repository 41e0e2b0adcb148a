"""Runs executions on workers, and recovers from the loss of one.

Contract: each session belongs to one worker and one thread. It carries out the commands of the
epoch's state, and tells the state how they ended.
"""
