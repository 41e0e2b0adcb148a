"""The workers and ps that answer at this moment, and those that are lost or come back.

Contract: asks servers over sockets and tells `SharedPresence` what it found; it changes no task.
"""
