"""Protocols that the rooms of training share: the host of a strategy, and who does executions.

Contract: protocols and records; nothing here runs a step.
"""
