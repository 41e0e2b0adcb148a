"""The loop behind `fit`, `evaluate`, `predict` and the methods on one batch.

Contract: each method takes Keras's arguments and returns the same as Keras. Each step counts
exactly once, whichever workers are lost. No step is in flight while user code can read variables.
"""

from __future__ import annotations

from kerasps.training.backup.backup_callback import running_fit
from kerasps.training.contract.dispatching import Dispatching
from kerasps.training.contract.host import Host
from kerasps.training.contract.metrics import MetricTotals
from kerasps.training.methods.eager import (
    StrategyOfLoop,
    is_running_eagerly,
    run_eagerly,
    runs_eagerly,
    without_current,
)
from kerasps.training.methods.on_batch import predict_on_batch, test_on_batch, train_on_batch
from kerasps.training.methods.trainer import evaluate, fit, predict

__all__ = [
    "Dispatching",
    "Host",
    "MetricTotals",
    "StrategyOfLoop",
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
