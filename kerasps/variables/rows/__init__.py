"""Rows: storages that tables share, shards of a variable, and values in chunks of rows.

Contract: maps rows to storages and back; chooses no ps.
"""
