"""Tracks which workers and ps answer, which are lost, and which are available again.

Contract: probes servers over sockets and reports to `SharedPresence`. It restarts no task; it only
lets leaving workers go.
"""
