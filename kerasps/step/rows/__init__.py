"""Look-ups of rows: which ids a step asks for, and where on the ps their rows are.

Contract: from ids to requests to rows, for tables that are read and updated alike.
"""
