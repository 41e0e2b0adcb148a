"""What the rooms of training agree on: the host of a strategy, and what carries out executions.

Contract: protocols and records; nothing here runs a step.
"""
