"""Backups during `fit`: their times, their contents, and resuming a training from one.

Contract: makes and reads backups between executions, when no step is in flight.
"""
