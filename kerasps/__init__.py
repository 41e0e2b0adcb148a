"""Parameter-server training for Keras 3, with `model.fit` unchanged."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasps.dataset_creator import DatasetCreator
    from kerasps.errors import (
        CheckpointError,
        ClusterConfigError,
        InputError,
        KeraspsError,
        PSLostError,
        TaskLostError,
        TaskStartError,
        TaskUnreachableError,
        UnsupportedError,
        WorkerLostError,
    )
    from kerasps.evaluator import Evaluation, SidecarEvaluator
    from kerasps.load import LoadReport, TaskLoad
    from kerasps.local_cluster import LocalCluster
    from kerasps.model_export import SidecarEvaluatorModelExport
    from kerasps.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner
    from kerasps.placement import Placement, TaskPlacement
    from kerasps.strategy import ParameterServerStrategy
    from kerasps.training_end import TrainingEndMarker

__all__ = [
    "CheckpointError",
    "ClusterConfigError",
    "DatasetCreator",
    "Evaluation",
    "FixedShardsPartitioner",
    "InputError",
    "KeraspsError",
    "LoadReport",
    "LocalCluster",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "PSLostError",
    "ParameterServerStrategy",
    "Placement",
    "SidecarEvaluator",
    "SidecarEvaluatorModelExport",
    "TaskLoad",
    "TaskLostError",
    "TaskPlacement",
    "TaskStartError",
    "TaskUnreachableError",
    "TrainingEndMarker",
    "UnsupportedError",
    "WorkerLostError",
    "__version__",
]

__version__ = "0.1.0"

# Names are imported when they are first used, so that a task's server and the command line start without Keras.
_MODULES = {
    "DatasetCreator": "dataset_creator",
    "Evaluation": "evaluator",
    "FixedShardsPartitioner": "partitioners",
    "LoadReport": "load",
    "LocalCluster": "local_cluster",
    "MaxSizePartitioner": "partitioners",
    "MinSizePartitioner": "partitioners",
    "ParameterServerStrategy": "strategy",
    "Placement": "placement",
    "SidecarEvaluator": "evaluator",
    "SidecarEvaluatorModelExport": "model_export",
    "TaskLoad": "load",
    "TaskPlacement": "placement",
    "TrainingEndMarker": "training_end",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
    if not isinstance(value, str):
        value.__module__ = __name__
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
