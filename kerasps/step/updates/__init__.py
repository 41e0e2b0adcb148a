"""The work of one `optimizer.apply` on a variable, on the worker and on the ps.

Contract: traces and runs an optimizer's `update_step`, for one or many variables; sends nothing.
"""
