"""The compute phase: an unmodified `train_step` as a pure function of a batch and of pulled values.

Contract: traces user code, records what it does to variables, and touches no remote resource.
"""
