"""Backups during `fit`: when to make one, what goes into it, and how a training resumes from it.

Contract: acts between executions, when no step is in flight.
"""
