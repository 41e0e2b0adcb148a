"""A step of a model (train, test or predict) as graphs for workers: pull, compute, push.

Contract: `step_for` returns a `TracedStep`. Call `load` before the first step and `store` after the
last; between them, run its graphs on any worker, in any order. Nothing here knows who drives it,
nor when: a coordinator does, a worker could by itself. `run_in_graph` puts a step into a graph that
somebody else builds.
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
