"""A step of a model (train, test or predict) as graphs for workers: pull, compute, push.

Contract: `step_for` returns a `TracedStep`. Call `load` before the first step and `store` after the
last; between them, run its graphs on any worker, in any order. Nothing here knows who drives it,
nor when: a coordinator does, a worker could by itself. `run_in_graph` puts a step into a graph that
somebody else builds.
"""

from __future__ import annotations

from kerasps.step.compute import Compute
from kerasps.step.inventory import DEFAULT_TABLE_MIN_BYTES
from kerasps.step.make_step import explaining, step_for, step_function
from kerasps.step.mode import PREDICT, TEST, TRAIN, Mode
from kerasps.step.replica_run import CallTicket, PushCounts, run_in_graph
from kerasps.step.state import Header, Ticket
from kerasps.step.timing import StepTiming
from kerasps.step.traced_step import ExecutionResult, TracedStep
from kerasps.step.traffic import LoadReport, TaskLoad, TrafficMeter
from kerasps.step.updating import UpdatePhase

__all__ = [
    "DEFAULT_TABLE_MIN_BYTES",
    "PREDICT",
    "TEST",
    "TRAIN",
    "CallTicket",
    "Compute",
    "ExecutionResult",
    "Header",
    "LoadReport",
    "Mode",
    "PushCounts",
    "StepTiming",
    "TaskLoad",
    "Ticket",
    "TracedStep",
    "TrafficMeter",
    "UpdatePhase",
    "explaining",
    "run_in_graph",
    "step_for",
    "step_function",
]
