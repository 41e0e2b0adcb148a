"""The functions by which a step's new values of states follow from the old ones.

Contract: found in the graph of the step, at the end of its trace or where a branch assigns.
"""
