"""Which tasks there are: the addresses by job, and the devices of the workers.

Contract: reads and checks what the user says; starts nothing and connects to nothing.
"""
