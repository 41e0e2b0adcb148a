"""Training in which each worker drives its own steps, and no coordinator hands them out.

Contract: every worker runs the same program and connects to the ps by itself; what they share is on
the ps, under names of the run. Steps are those of `step/`, done in the worker's own process. Nobody
waits for a worker but, at the beginning, for the chief.
"""

from __future__ import annotations

from kerasps.worker_driven.specs import EvalSpec, RunConfig, TrainSpec
from kerasps.worker_driven.strategy import WorkerDrivenStrategy
from kerasps.worker_driven.tasks import train_and_evaluate

__all__ = ["EvalSpec", "RunConfig", "TrainSpec", "WorkerDrivenStrategy", "train_and_evaluate"]
