"""The loop behind `fit`, `evaluate`, `predict` and the methods on one batch.

Contract: each method takes Keras's arguments and returns what Keras returns. Steps are counted
exactly, whichever workers are lost; variables are at rest whenever user code can look at them.
"""

from __future__ import annotations

from kerasps.training.backup import running_fit
from kerasps.training.coordinator_port import CoordinatorPort
from kerasps.training.dispatcher import Dispatcher
from kerasps.training.dispatching import Dispatching
from kerasps.training.eager import (
    StrategyOfLoop,
    is_running_eagerly,
    run_eagerly,
    runs_eagerly,
    without_current,
)
from kerasps.training.epoch_events import Execution, Report, SplitPosition
from kerasps.training.metrics import MetricTotals
from kerasps.training.on_batch import predict_on_batch, test_on_batch, train_on_batch
from kerasps.training.scheduled import Parts, ScheduledCalls
from kerasps.training.staleness import Staleness, StalenessMeter, WorkerStaleness
from kerasps.training.trainer import evaluate, fit, predict

__all__ = [
    "CoordinatorPort",
    "Dispatcher",
    "Dispatching",
    "Execution",
    "MetricTotals",
    "Parts",
    "Report",
    "ScheduledCalls",
    "SplitPosition",
    "Staleness",
    "StalenessMeter",
    "StrategyOfLoop",
    "WorkerStaleness",
    "evaluate",
    "fit",
    "is_running_eagerly",
    "predict",
    "predict_on_batch",
    "run_eagerly",
    "running_fit",
    "runs_eagerly",
    "test_on_batch",
    "train_on_batch",
    "without_current",
]
