"""The loop behind `fit`, `evaluate`, `predict` and the methods on one batch.

Contract: each method takes Keras's arguments and returns what Keras returns. Steps are counted
exactly, whichever workers are lost; variables are at rest whenever user code can look at them.
"""

from __future__ import annotations

from kerasps.training.backup.backup_callback import running_fit
from kerasps.training.calls.coordinator_port import CoordinatorPort
from kerasps.training.calls.scheduled import Parts, ScheduledCalls
from kerasps.training.epoch.dispatching import Dispatching
from kerasps.training.epoch.epoch_events import Execution, Report, SplitPosition
from kerasps.training.epoch.metrics import MetricTotals
from kerasps.training.methods.eager import (
    StrategyOfLoop,
    is_running_eagerly,
    run_eagerly,
    runs_eagerly,
    without_current,
)
from kerasps.training.methods.on_batch import predict_on_batch, test_on_batch, train_on_batch
from kerasps.training.methods.trainer import evaluate, fit, predict
from kerasps.training.sessions.dispatcher import Dispatcher
from kerasps.training.sessions.staleness import Staleness, StalenessMeter, WorkerStaleness

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
