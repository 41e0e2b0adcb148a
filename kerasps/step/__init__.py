"""A step of a model (train, test or predict) as graphs for workers: pull, compute, push.

Contract: `step_for` returns a `TracedStep`. Call `load` before the first step and `store` after the
last; between them, run its graphs on any worker, in any order. No module here knows which process
drives the steps: a coordinator or a worker. `run_in_graph` adds a step to another graph.
"""

from __future__ import annotations

from kerasps.step.compute.compute import Compute
from kerasps.step.records.mode import PREDICT, TEST, TRAIN, Mode
from kerasps.step.running.traced_step import ExecutionResult, TracedStep

__all__ = [
    "PREDICT",
    "TEST",
    "TRAIN",
    "Compute",
    "ExecutionResult",
    "Mode",
    "TracedStep",
]
