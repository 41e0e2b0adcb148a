"""`LocalCluster`: all tasks of a cluster as processes of this machine.

Contract: composes descriptions, servers and processes; whoever uses it sees a cluster resolver.
"""
