"""Tables without a vocabulary: rows that belong to ids, made when they are first updated.

Contract: turns ids into keys, and keys into places of rows on a ps or in this process. It knows no
steps: a step calls `KeyedRows.look_up` in its pull, and `KeyedRows.made` in its push.
"""
