"""Which workers and ps answer at this moment, and which are lost or come back.

Contract: asks servers over sockets and tells `Membership` what it found; it changes no task.
"""
