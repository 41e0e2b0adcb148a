"""Parameter-server training for Keras 3, with `model.fit` unchanged.

Contract: the names in `__all__` are public, and nothing else is. Importing the package starts
nothing, connects to nothing, and imports neither Keras nor TensorFlow.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasps import callbacks, layers, metrics, serving
    from kerasps.callbacks import (
        BackupAndRestore,
        ClusterMonitor,
        DeltaExport,
        StalenessLogger,
        TableMetrics,
    )
    from kerasps.central_storage import CentralStorageStrategy
    from kerasps.cluster.description.cluster_description import ClusterDescription
    from kerasps.cluster.description.protocol import ClusterResolver
    from kerasps.cluster.local.local_cluster import LocalCluster
    from kerasps.cluster.members.membership import WorkerInfo
    from kerasps.cluster.processes.process import TaskProcess
    from kerasps.errors import (
        CheckpointError,
        ClusterClosedError,
        ClusterConfigError,
        DeltaError,
        InputError,
        KeraspsError,
        MissingNameError,
        PSLostError,
        TaskLostError,
        TaskStartError,
        TaskUnreachableError,
        UnsupportedError,
        WorkerLostError,
    )
    from kerasps.evaluator.best_model import SidecarEvaluatorModelExport
    from kerasps.evaluator.sidecar import Evaluation, SidecarEvaluator
    from kerasps.evaluator.training_end import TrainingEndMarker
    from kerasps.inputs import DatasetCreator
    from kerasps.layers.warm_starts import TakenTable, WarmStart, warm_start
    from kerasps.step.tracing.traffic import LoadReport, TableSize, TaskLoad
    from kerasps.strategy import ParameterServerStrategy
    from kerasps.strategy_arguments import StrategyOptions
    from kerasps.tools.monitoring.status import (
        ProcessUsage,
        PSRunStatus,
        RunStatus,
        TableStatus,
        WorkerRunStatus,
    )
    from kerasps.tools.tracing import Trace
    from kerasps.training.contract.staleness import Staleness, WorkerStaleness
    from kerasps.variables import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner
    from kerasps.variables.placing.placement import LookedUp, Placement, TaskPlacement
    from kerasps.worker_driven import (
        EvalSpec,
        RunConfig,
        TrainSpec,
        WorkerDrivenStrategy,
        train_and_evaluate,
    )

__all__ = [
    "BackupAndRestore",
    "CentralStorageStrategy",
    "CheckpointError",
    "ClusterClosedError",
    "ClusterConfigError",
    "ClusterDescription",
    "ClusterMonitor",
    "ClusterResolver",
    "DatasetCreator",
    "DeltaError",
    "DeltaExport",
    "EvalSpec",
    "Evaluation",
    "FixedShardsPartitioner",
    "InputError",
    "KeraspsError",
    "LoadReport",
    "LocalCluster",
    "LookedUp",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "MissingNameError",
    "PSLostError",
    "PSRunStatus",
    "ParameterServerStrategy",
    "Placement",
    "ProcessUsage",
    "RunConfig",
    "RunStatus",
    "SidecarEvaluator",
    "SidecarEvaluatorModelExport",
    "Staleness",
    "StalenessLogger",
    "StrategyOptions",
    "TableMetrics",
    "TableSize",
    "TableStatus",
    "TakenTable",
    "TaskLoad",
    "TaskLostError",
    "TaskPlacement",
    "TaskProcess",
    "TaskStartError",
    "TaskUnreachableError",
    "Trace",
    "TrainSpec",
    "TrainingEndMarker",
    "UnsupportedError",
    "WarmStart",
    "WorkerDrivenStrategy",
    "WorkerInfo",
    "WorkerLostError",
    "WorkerRunStatus",
    "WorkerStaleness",
    "__version__",
    "callbacks",
    "layers",
    "metrics",
    "serving",
    "train_and_evaluate",
    "warm_start",
]

__version__ = "0.1.0"

# Names are imported when they are first used, so that a task's server and the command line start
# without Keras.
_MODULES = {
    "BackupAndRestore": "callbacks",
    "CentralStorageStrategy": "central_storage",
    "ClusterDescription": "cluster.description.cluster_description",
    "ClusterMonitor": "callbacks",
    "ClusterResolver": "cluster.description.protocol",
    "DatasetCreator": "inputs",
    "DeltaExport": "callbacks",
    "EvalSpec": "worker_driven",
    "Evaluation": "evaluator.sidecar",
    "FixedShardsPartitioner": "variables",
    "LoadReport": "step.tracing.traffic",
    "LocalCluster": "cluster.local.local_cluster",
    "LookedUp": "variables.placing.placement",
    "MaxSizePartitioner": "variables",
    "MinSizePartitioner": "variables",
    "PSRunStatus": "tools.monitoring.status",
    "ParameterServerStrategy": "strategy",
    "Placement": "variables.placing.placement",
    "ProcessUsage": "tools.monitoring.status",
    "RunConfig": "worker_driven",
    "RunStatus": "tools.monitoring.status",
    "SidecarEvaluator": "evaluator.sidecar",
    "SidecarEvaluatorModelExport": "evaluator.best_model",
    "Staleness": "training.contract.staleness",
    "StalenessLogger": "callbacks",
    "StrategyOptions": "strategy_arguments",
    "TableMetrics": "callbacks",
    "TableSize": "step.tracing.traffic",
    "TableStatus": "tools.monitoring.status",
    "TakenTable": "layers.warm_starts",
    "TaskLoad": "step.tracing.traffic",
    "TaskPlacement": "variables.placing.placement",
    "TaskProcess": "cluster.processes.process",
    "Trace": "tools.tracing",
    "TrainSpec": "worker_driven",
    "TrainingEndMarker": "evaluator.training_end",
    "WarmStart": "layers.warm_starts",
    "WorkerDrivenStrategy": "worker_driven",
    "WorkerRunStatus": "tools.monitoring.status",
    "WorkerInfo": "cluster.members.membership",
    "WorkerStaleness": "training.contract.staleness",
    "callbacks": "callbacks",
    "layers": "layers",
    "metrics": "metrics",
    "serving": "serving",
    "train_and_evaluate": "worker_driven",
    "warm_start": "layers.warm_starts",
}

# Names that users of TensorFlow's estimators look for, and what replaces them.
_TABLE = 'the table "Where an argument of TensorFlow\'s estimators went" in docs/worker_driven.md'
_OF_ESTIMATORS = {
    "Estimator": "Give `kerasps.train_and_evaluate` a function that returns a compiled Keras model",
    "EstimatorSpec": "A `model_fn` returns a compiled Keras model",
    "ModeKeys": "A Keras model knows by `training=` what it is called for",
    "WarmStartSettings": "Call `load_weights` in the `model_fn`",
    "SessionRunHook": "Write a `keras.callbacks.Callback`",
    "Exporter": "Use `kerasps.SidecarEvaluatorModelExport`",
    "BestExporter": "Use `kerasps.SidecarEvaluatorModelExport`",
    "FinalExporter": "Use `keras.callbacks.ModelCheckpoint`, or `model.export` after the training",
    "LatestExporter": "Use `keras.callbacks.ModelCheckpoint`",
}


def _moved(name: str) -> str:
    """Return what to use in place of a name of TensorFlow's estimators; empty for other names."""
    canned = name.endswith(("Classifier", "Regressor", "Estimator"))
    use = _OF_ESTIMATORS.get(name) or (canned and _OF_ESTIMATORS["Estimator"])
    if not use and name.endswith("Hook"):
        use = _OF_ESTIMATORS["SessionRunHook"]
    return f". {use}; see {_TABLE}." if use else ""


# Hidden from type checkers, which would accept every name otherwise.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            # Python suggests a similar name, as it gets the module.
            message = f"module {__name__!r} has no attribute {name!r}{_moved(name)}"
            raise AttributeError(message, name=name, obj=sys.modules[__name__])
        try:
            module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'errors')}")
        except ImportError as exc:
            # Keras cannot be imported where its backend is not installed.
            error = importlib.import_module(f"{__name__}._compat").backend_error()
            if error is None:
                raise
            raise error from exc
        if _MODULES.get(name) == name:
            return module
        value = getattr(module, name)
        if not isinstance(value, str):
            value.__module__ = __name__
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
