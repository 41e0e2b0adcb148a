"""Every private name of Keras and TensorFlow that kerasps uses, and why.

This is the only module that reaches into private parts of Keras or TensorFlow. A name is imported when it is first asked
for, so that the modules which need no TensorFlow (the server of a task, the command line) start fast. A name that has moved
fails loudly, with the versions that are supported; `tests/test_compat.py` resolves every one of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from dataclasses import dataclass
from typing import Any

SUPPORTED_VERSIONS = "Keras 3.12 to 3.15 with TensorFlow 2.20 or 2.21"


@dataclass(frozen=True)
class PrivateName:
    """A private name: where it lives, why it is needed, and the parameters that kerasps relies on."""

    module: str
    attribute: str
    why: str
    parameters: tuple[str, ...] = ()


PRIVATE_NAMES: dict[str, PrivateName] = {
    "BaseOptimizer": PrivateName(
        "keras.src.optimizers.base_optimizer",
        "BaseOptimizer",
        "`_backend_apply_gradients` is where gradients leave the worker",
    ),
    "TFOptimizer": PrivateName(
        "keras.src.backend.tensorflow.optimizer",
        "TFOptimizer",
        "`_backend_update_step` and `_var_key` are what its update loop goes through",
    ),
    "TensorFlowTrainer": PrivateName(
        "keras.src.backend.tensorflow.trainer",
        "TensorFlowTrainer",
        "`fit`, `evaluate` and `predict` of a model whose strategy is ours go to our trainer",
    ),
    "model_supports_jit": PrivateName(
        "keras.src.trainers.trainer",
        "model_supports_jit",
        "Keras's own answer to whether all layers of a model compile with XLA",
        ("model",),
    ),
    "get_data_adapter": PrivateName(
        "keras.src.trainers.data_adapters",
        "get_data_adapter",
        "turns whatever Keras's `fit` takes into a `tf.data.Dataset`",
        ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "shuffle", "class_weight"),
    ),
    "train_validation_split": PrivateName(
        "keras.src.trainers.data_adapters.array_slicing",
        "train_validation_split",
        "`validation_split` of arrays",
        ("arrays", "validation_split"),
    ),
    "class_weight_to_sample_weights": PrivateName(
        "keras.src.trainers.data_adapters.data_adapter_utils",
        "class_weight_to_sample_weights",
        "class_weight in `train_on_batch`",
        ("y", "class_weight"),
    ),
    "make_class_weight_map_fn": PrivateName(
        "keras.src.trainers.data_adapters.tf_dataset_adapter",
        "make_class_weight_map_fn",
        "`class_weight` for a dataset that a `dataset_fn` returned",
        ("class_weight",),
    ),
    "pythonify_logs": PrivateName(
        "keras.src.utils.python_utils", "pythonify_logs", "logs as plain floats, in the order that Keras gives them", ("logs",)
    ),
    "potentially_ragged_concat": PrivateName(
        "keras.src.backend.tensorflow.trainer",
        "potentially_ragged_concat",
        "joins the outputs of predict's batches exactly as Keras does",
        ("tensors",),
    ),
    "get_stateless_scope": PrivateName(
        "keras.src.backend.common.stateless_scope",
        "get_stateless_scope",
        "a value that `keras.StatelessScope` holds goes before the value of a step",
    ),
    "keras_config": PrivateName("keras.src.backend", "config", "`max_epochs` and `max_steps_per_epoch`, Keras's caps for debugging"),
    "record_variable_access": PrivateName(
        "tensorflow.python.pywrap_tfe",
        "TFE_Py_TapeVariableAccessed",
        "tells a GradientTape that a variable was read when its pulled value is handed out",
    ),
    "ParameterServerStrategyV2Extended": PrivateName(
        "tensorflow.python.distribute.parameter_server_strategy_v2",
        "ParameterServerStrategyV2Extended",
        "decides where a variable goes; the public strategy offers no other way",
        ("container_strategy", "cluster_resolver", "variable_partitioner"),
    ),
    "colocate_with": PrivateName(
        "tensorflow.python.framework.ops",
        "colocate_with",
        "leaves an outer colocation scope before a variable is placed",
        ("op", "ignore_existing"),
    ),
    "get_default_replica_mode": PrivateName(
        "tensorflow.python.distribute.distribute_lib",
        "_get_default_replica_mode",
        "`evaluate` and `predict` run on the coordinator as if no strategy were current, also inside `strategy.scope()`",
    ),
    "push_per_thread_mode": PrivateName(
        "tensorflow.python.distribute.distribute_lib", "_push_per_thread_mode", "as above", ("context",)
    ),
    "pop_per_thread_mode": PrivateName(
        "tensorflow.python.distribute.distribute_lib", "_pop_per_thread_mode", "as above"
    ),
    "serialize_dataset_to_graph": PrivateName(
        "tensorflow.python.distribute.coordinator.values",
        "serialize_dataset_to_graph",
        "a dataset given whole travels to the workers as a graph",
        ("dataset",),
    ),
    "deserialize_dataset_from_graph": PrivateName(
        "tensorflow.python.distribute.coordinator.values",
        "deserialize_dataset_from_graph",
        "the other end of that way",
        ("graph_def", "element_spec"),
    ),
    "get_current_dispatch_context": PrivateName(
        "tensorflow.python.distribute.coordinator.coordinator_context",
        "get_current_dispatch_context",
        "names the worker on which an execution runs",
    ),
    "PSUnavailableError": PrivateName(
        "tensorflow.python.distribute.coordinator.cluster_coordinator",
        "PSUnavailableError",
        "how the coordinator reports a lost ps",
    ),
    "is_ps_failure": PrivateName(
        "tensorflow.python.distribute.coordinator.cluster_coordinator",
        "_is_ps_failure",
        "how the coordinator tells a lost ps from other errors",
        ("error",),
    ),
}


def resolve(name: str) -> Any:
    """Imports a private name; raises ImportError that names the supported versions when it is gone."""
    private = PRIVATE_NAMES[name]
    try:
        module = importlib.import_module(private.module)
        return getattr(module, private.attribute)
    except (ImportError, AttributeError) as exc:
        raise ImportError(
            f"kerasps needs `{private.module}.{private.attribute}` ({private.why}) and did not find it. Expected: "
            f"{SUPPORTED_VERSIONS}. Received: {_installed_versions()}. Install a supported pair of versions."
        ) from exc


def __getattr__(name: str) -> Any:
    if name not in PRIVATE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = resolve(name)
    globals()[name] = value
    return value


def missing_parameters(name: str) -> list[str]:
    """The parameters that kerasps passes to a private function and that it no longer has."""
    target = resolve(name)
    if inspect.isclass(target):
        target = target.__init__
    wanted = PRIVATE_NAMES[name].parameters
    if not wanted:
        return []
    known = inspect.signature(target).parameters
    return [parameter for parameter in wanted if parameter not in known]


def _installed_versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("keras", "tensorflow"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def import_server_lib() -> types.ModuleType:
    """Imports TensorFlow's `server_lib` without the rest of TensorFlow.

    The whole package costs 3 CPU seconds to import and 450 MB; a task's server needs the runtime only (0.5 s, 180 MB). The
    packages `tensorflow` and `tensorflow.python` are entered as bare modules, so that their `__init__` does not run. Works in
    a process that has not imported TensorFlow and never will; where TensorFlow is imported already, it is used as it is.
    """
    if "tensorflow" not in sys.modules:
        spec = importlib.util.find_spec("tensorflow")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("TensorFlow is not installed; `pip install kerasps` installs it.")
        root = list(spec.submodule_search_locations)
        for name, path in (("tensorflow", root), ("tensorflow.python", [f"{root[0]}/python"])):
            module = types.ModuleType(name)
            module.__path__ = path
            sys.modules[name] = module
    return importlib.import_module("tensorflow.python.training.server_lib")
