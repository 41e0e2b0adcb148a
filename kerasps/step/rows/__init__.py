"""Look-ups of rows: the ids that a step asks for, and the places of their rows on the ps.

Contract: turns ids into requests and replies into rows, for groups of tables.
"""
