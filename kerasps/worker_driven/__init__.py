"""Training in which each worker drives its steps, and no coordinator hands them out.

Contract: every worker runs the same program and connects to the ps. Workers share their state on
the ps, under names of the run. Steps are those of `step/`, done in the worker's process. No worker
waits for another one, except for the chief at the beginning.
"""

from __future__ import annotations

from kerasps.worker_driven.specs import EvalSpec, RunConfig, TrainSpec
from kerasps.worker_driven.strategy import WorkerDrivenStrategy
from kerasps.worker_driven.tasks import train_and_evaluate

__all__ = ["EvalSpec", "RunConfig", "TrainSpec", "WorkerDrivenStrategy", "train_and_evaluate"]
