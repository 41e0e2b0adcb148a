"""The work of one `optimizer.apply` on a variable, on the worker and on the ps.

Contract: traces and runs an optimizer's `update_step`, on small variables as on one; sends nothing.
"""
