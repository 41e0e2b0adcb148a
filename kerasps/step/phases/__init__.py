"""Pull, compute and push as operations of a step graph.

Contract: each phase is traced once and adds its operations to each step. The phases share only the
`StepContext`.
"""
