"""The commands of `kerasps`: the options of each, and what it begins.

Contract: a command imports what it needs when it runs, so that none waits for another's.
"""
