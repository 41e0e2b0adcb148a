"""A process beside the training, which evaluates its checkpoints as they appear.

Contract: it connects to no task and shares nothing with the training but a directory, or a pipe
    that says when it ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kerasps._doors import opened_when_used

if TYPE_CHECKING:
    from kerasps.evaluator.arguments import check_exports, check_list
    from kerasps.evaluator.best_model import SidecarEvaluatorModelExport
    from kerasps.evaluator.process import EvaluatorProcess
    from kerasps.evaluator.sidecar import Evaluation, SidecarEvaluator
    from kerasps.evaluator.training_end import TrainingEnd, TrainingEndMarker
    from kerasps.evaluator.watched import newest_checkpoint

__all__ = [
    "Evaluation",
    "EvaluatorProcess",
    "SidecarEvaluator",
    "SidecarEvaluatorModelExport",
    "TrainingEnd",
    "TrainingEndMarker",
    "check_exports",
    "check_list",
    "newest_checkpoint",
]

if not TYPE_CHECKING:  # to which it would make every name a valid one
    __getattr__ = opened_when_used(
        __name__,
        {
            "Evaluation": "sidecar",
            "EvaluatorProcess": "process",
            "SidecarEvaluator": "sidecar",
            "SidecarEvaluatorModelExport": "best_model",
            "TrainingEnd": "training_end",
            "TrainingEndMarker": "training_end",
            "check_exports": "arguments",
            "check_list": "arguments",
            "newest_checkpoint": "watched",
        },
    )
