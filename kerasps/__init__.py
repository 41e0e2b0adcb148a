"""Parameter-server training for Keras 3, with `model.fit` unchanged."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasps.dataset_creator import DatasetCreator
    from kerasps.errors import (
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
    from kerasps.load import LoadReport, TaskLoad
    from kerasps.local_cluster import LocalCluster
    from kerasps.partitioners import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner
    from kerasps.placement import Placement, TaskPlacement
    from kerasps.strategy import ParameterServerStrategy

__all__ = [
    "ClusterConfigError",
    "DatasetCreator",
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
    "TaskLoad",
    "TaskLostError",
    "TaskPlacement",
    "TaskStartError",
    "TaskUnreachableError",
    "UnsupportedError",
    "WorkerLostError",
    "__version__",
]

__version__ = "0.1.0"

# Names are imported when they are first used, so that a task's server and the command line start without Keras.
_MODULES = {
    "DatasetCreator": "dataset_creator",
    "FixedShardsPartitioner": "partitioners",
    "LoadReport": "load",
    "LocalCluster": "local_cluster",
    "MaxSizePartitioner": "partitioners",
    "MinSizePartitioner": "partitioners",
    "ParameterServerStrategy": "strategy",
    "Placement": "placement",
    "TaskLoad": "load",
    "TaskPlacement": "placement",
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
