"""Protocols that the rooms of training share: the host of a strategy, and `Dispatching`.

Contract: protocols, records, sums and meters; nothing here runs a step.
"""
