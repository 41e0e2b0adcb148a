"""The tasks of a cluster: their addresses by job, and the devices of the workers.

Contract: reads and checks what users and schedulers set; starts nothing and connects to nothing.
"""
