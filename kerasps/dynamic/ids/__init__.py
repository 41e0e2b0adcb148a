"""Ids, the keys that they become, and the first rows that follow from them.

Contract: computes on tensors; knows neither ps nor tables.
"""
