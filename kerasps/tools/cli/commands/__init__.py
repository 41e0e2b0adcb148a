"""The commands of `kerasps`: their options, and the functions that run them.

Contract: a command imports its modules when it runs, so that none waits for another's imports.
"""
