"""Runs that go on: found from another process, shown and traced.

Contract: asks a run by its socket, its address or its tasks, and changes nothing in it.
"""
