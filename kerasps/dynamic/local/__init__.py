"""The table in one process, without a strategy.

Contract: ordinary variables of Keras by place; files have them by id, as those of ps.
"""
