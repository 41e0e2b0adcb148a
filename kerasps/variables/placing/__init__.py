"""Chooses the ps and the number of shards of a new variable, and makes it there.

Contract: places by bytes; never moves a variable that exists.
"""
