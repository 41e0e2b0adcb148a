"""`LocalCluster`: all tasks of a cluster as processes of this machine.

Contract: composes descriptions, servers and processes; its users see a cluster resolver.
"""
