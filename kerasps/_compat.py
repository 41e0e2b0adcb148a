"""Every private name of Keras and TensorFlow that kerasps uses, and why.

This is the only module that reaches into private parts of Keras or TensorFlow. A name is imported when it is first asked
for, so that the modules which need no TensorFlow (the server of a task, the command line) start fast. A name that has moved
fails loudly, with the versions that are supported; `tests/test_compat.py` resolves every one of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
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
    "BaseTrainer": PrivateName(
        "keras.src.trainers.trainer",
        "Trainer",
        "`compile` of a model whose strategy is ours makes what it makes in the strategy's scope, and adopts the rest",
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
    "data_adapters": PrivateName(
        "keras.src.trainers", "data_adapters", "reads generators, `PyDataset`s and loaders in the way that Keras does"
    ),
    "potentially_ragged_concat": PrivateName(
        "keras.src.backend.tensorflow.trainer",
        "potentially_ragged_concat",
        "puts the outputs of `predict` together as Keras does, also where their lengths differ",
        ("tensors",),
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
    "get_stateless_scope": PrivateName(
        "keras.src.backend.common.stateless_scope",
        "get_stateless_scope",
        "a value that `keras.StatelessScope` holds goes before the value of a step",
    ),
    "keras_config": PrivateName(
        "keras.src.backend", "config", "`max_epochs` and `max_steps_per_epoch`, Keras's caps for debugging"
    ),
    "record_variable_access": PrivateName(
        "tensorflow.python.pywrap_tfe",
        "TFE_Py_TapeVariableAccessed",
        "tells a GradientTape that a variable was read when its pulled value is handed out",
    ),
    "containing_xla_context": PrivateName(
        "tensorflow.python.ops.control_flow_util",
        "GetContainingXLAContext",
        "whether a function is traced to be compiled by XLA, which takes no variables of other machines",
        ("ctxt",),
    ),
    "ParameterServerStrategyV2Extended": PrivateName(
        "tensorflow.python.distribute.parameter_server_strategy_v2",
        "ParameterServerStrategyV2Extended",
        "decides where a variable goes; the public strategy offers no other way",
        ("container_strategy", "cluster_resolver", "variable_partitioner"),
    ),
    "ResourceVariable": PrivateName(
        "tensorflow.python.ops.resource_variable_ops",
        "ResourceVariable",
        "the class of a `tf.Variable`; made from a handle, it can have a name on its task",
        ("trainable", "shape", "dtype", "handle"),
    ),
    "create_handle_data": PrivateName(
        "tensorflow.python.ops.handle_data_util",
        "create_handle_data",
        "the shape and dtype of a variable that is made from a handle",
        ("shape", "dtype"),
    ),
    "set_handle_data": PrivateName(
        "tensorflow.python.ops.handle_data_util", "set_handle_data", "as above", ("target_t", "handle_data")
    ),
    "InternalTensor": PrivateName(
        "tensorflow.python.types.core",
        "Tensor",
        "what `tf.is_tensor` asks for: Keras does not copy the shards of a variable into an array then",
    ),
    "NativeObject": PrivateName(
        "tensorflow.python.types.internal",
        "NativeObject",
        "what `tf.nn.embedding_lookup` hands on as it is; anything else it reads whole",
    ),
    "keras_numpy": PrivateName(
        "keras.src.backend.tensorflow",
        "numpy",
        "`take` is how `keras.layers.Embedding` reads its table",
    ),
    "colocate_with": PrivateName(
        "tensorflow.python.framework.ops",
        "colocate_with",
        "leaves an outer colocation scope before a variable is placed",
        ("op", "ignore_existing"),
    ),
    "draw_seed": PrivateName(
        "keras.src.random.seed_generator", "draw_seed", "the seed of an initializer, drawn once for all shards", ("seed",)
    ),
    "cast_seed": PrivateName("keras.src.backend.tensorflow.random", "_cast_seed", "as above", ("seed",)),
    "compute_fans": PrivateName(
        "keras.src.initializers.random_initializers",
        "compute_fans",
        "the scale of `VarianceScaling`, from the shape of the whole variable",
        ("shape",),
    ),
    "get_default_replica_mode": PrivateName(
        "tensorflow.python.distribute.distribute_lib",
        "_get_default_replica_mode",
        "`LossScaleOptimizer.apply` in the scope, but outside a step, runs as if no strategy were current",
    ),
    "push_per_thread_mode": PrivateName(
        "tensorflow.python.distribute.distribute_lib", "_push_per_thread_mode", "as above", ("context",)
    ),
    "pop_per_thread_mode": PrivateName("tensorflow.python.distribute.distribute_lib", "_pop_per_thread_mode", "as above"),
    "CancellationManagerContext": PrivateName(
        "tensorflow.python.eager.cancellation",
        "CancellationManagerContext",
        "makes the calls of executions cancellable, as `ClusterCoordinator.schedule` makes those of a `tf.function`",
        ("cancellation_manager",),
    ),
    "CancellationManager": PrivateName(
        "tensorflow.python.eager.cancellation", "CancellationManager", "cancels the executions that wait for a lost ps"
    ),
    "eager_mode": PrivateName(
        "tensorflow.python.eager.context",
        "eager_mode",
        "a variable that is collected while TensorFlow builds a graph is destroyed now, and not by the graph",
    ),
    "execute": PrivateName(
        "tensorflow.python.eager.execute",
        "execute",
        "fetches outside of what makes calls cancellable: a fetch that fails would cancel all that is in flight",
        ("op_name", "num_outputs", "inputs", "attrs", "ctx"),
    ),
    "eager_context": PrivateName(
        "tensorflow.python.eager.context",
        "context",
        "at exit, functions are not removed from tasks that may have ended before: TensorFlow prints a screen of errors then; "
        "and it holds the configuration that tasks get",
    ),
    "EagerTensor": PrivateName("tensorflow.python.framework.ops", "EagerTensor", "finds the handles of all living resources"),
    "TensorProto": PrivateName(
        "tensorflow.core.framework.tensor_pb2", "TensorProto", "what a handle says: the name of a resource, and its type"
    ),
    "ResourceHandleProto": PrivateName("tensorflow.core.framework.resource_handle_pb2", "ResourceHandleProto", "as above"),
    "ConcreteFunction": PrivateName(
        "tensorflow.python.eager.polymorphic_function.concrete_function",
        "ConcreteFunction",
        "a compiled function from before the connection gets the new handles of variables",
    ),
    "CapturableResource": PrivateName(
        "tensorflow.python.trackable.resource",
        "CapturableResource",
        "what a lookup table is, and other things that know how to make their resource again",
    ),
    "InitializableLookupTableBase": PrivateName(
        "tensorflow.python.ops.lookup_ops",
        "InitializableLookupTableBase",
        "a table that is filled once, and not by `insert`",
    ),
    "ResourceSummaryWriter": PrivateName(
        "tensorflow.python.ops.summary_ops_v2",
        "_ResourceSummaryWriter",
        "a writer from before the connection is closed, so that its file is whole",
    ),
    "new_executor": PrivateName(
        "tensorflow.python.eager.executor",
        "new_executor",
        "sends executions to a worker while it runs others, up to a limit",
        ("enable_async", "in_flight_nodes_limit"),
    ),
    "Executor": PrivateName(
        "tensorflow.python.eager.executor", "Executor", "hooked: deletes an executor whose task is gone without printing why"
    ),
    "TracedFunction": PrivateName(
        "tensorflow.python.eager.polymorphic_function.polymorphic_function",
        "Function",
        "hooked: a `tf.function` that a step calls is traced as a part of the step",
    ),
    "autograph_context": PrivateName(
        "tensorflow.python.autograph.core", "ag_ctx", "the control flow of such a function is converted, as it asks for"
    ),
    "py_func_from_autograph": PrivateName(
        "tensorflow.python.eager.polymorphic_function.autograph_util",
        "py_func_from_autograph",
        "what a `tf.function` does to its Python function before it traces it",
        ("python_func",),
    ),
    "get_read_only_resource_input_indices_graph": PrivateName(
        "tensorflow.python.framework.auto_control_deps_utils",
        "get_read_only_resource_input_indices_graph",
        "which of the resources that a step uses it leaves as they are",
        ("func_graph",),
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
    "MultiDeviceSaver": PrivateName(
        "tensorflow.python.checkpoint.functional_saver",
        "MultiDeviceSaver",
        "hooked: writes and reads checkpoints; what is in shards is left to ours",
        ("serialized_tensors",),
    ),
    "CheckpointCallable": PrivateName(
        "tensorflow.python.checkpoint.tensor_callable",
        "Callable",
        "what stands for a value in a checkpoint that is read when it is written",
        ("tensor_callable", "dtype", "device"),
    ),
    "saved_model": PrivateName(
        "tensorflow.python.saved_model",
        "save",
        "hooked: `save_and_return_nodes`, which `tf.saved_model.save` calls, and traces what the model's functions are",
    ),
    "saving_lib": PrivateName(
        "keras.src.saving",
        "saving_lib",
        "its functions behind `model.save`, `keras.saving.load_model` and others are hooked",
    ),
    "legacy_h5_format": PrivateName(
        "keras.src.legacy.saving", "legacy_h5_format", "hooked: `save_model_to_hdf5` is behind `model.save` to an `.h5` file"
    ),
    "H5IOStore": PrivateName(
        "keras.src.saving.saving_lib", "H5IOStore", "hooked: its entries are written and read a piece at a time"
    ),
    "ShardedH5IOStore": PrivateName(
        "keras.src.saving.saving_lib", "ShardedH5IOStore", "not so its subclass, which has a file open at a time"
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
    "is_worker_failure": PrivateName(
        "tensorflow.python.distribute.coordinator.cluster_coordinator",
        "_is_worker_failure",
        "which errors the coordinator takes for a lost worker",
        ("error",),
    ),
    "is_ps_failure": PrivateName(
        "tensorflow.python.distribute.coordinator.cluster_coordinator",
        "_is_ps_failure",
        "how the coordinator tells a lost ps from other errors",
        ("error",),
    ),
}


@dataclass(frozen=True)
class PrivateAttribute:
    """A private attribute of an object of Keras or TensorFlow: why it is needed, and the parameters that kerasps relies on."""

    name: str
    why: str
    parameters: tuple[str, ...] = ()


# By "module:class". What kerasps hooks or overrides is here too: under another name it would silently no longer be called.
PRIVATE_ATTRIBUTES: dict[str, tuple[PrivateAttribute, ...]] = {
    "keras.src.optimizers.base_optimizer:BaseOptimizer": (
        PrivateAttribute(
            "_backend_apply_gradients", "hooked: where gradients leave the worker", ("grads", "trainable_variables")
        ),
        PrivateAttribute("_get_current_learning_rate", "hooked: a ps is sent the learning rate and reads none"),
        PrivateAttribute("_clip_gradients", "clipping stays on the worker, or follows accumulation on the ps", ("grads",)),
        PrivateAttribute("_get_variable_index", "finds the accumulator of a variable", ("variable",)),
        PrivateAttribute("_use_weight_decay", "variables that decay are updated apart from those that do not", ("variable",)),
        PrivateAttribute("_trainable_variables", "slots are lists parallel to it"),
        PrivateAttribute("_accumulated_gradients", "gradient accumulation goes on on the ps"),
        PrivateAttribute("_model_variables_moving_average", "each ps moves the averages of its own variables"),
        PrivateAttribute("_iterations", "counts every call of `apply`; `iterations` leaves accumulating ones out"),
    ),
    "keras.src.backend.tensorflow.optimizer:TFOptimizer": (
        PrivateAttribute(
            "_backend_update_step",
            "hooked, and called so that an optimizer's own override runs",
            ("grads", "trainable_variables", "learning_rate"),
        ),
        PrivateAttribute("_apply_weight_decay", "weight decay runs on the ps", ("variables",)),
        PrivateAttribute("_var_key", "hooked: Keras finds a variable's slots by it", ("variable",)),
        PrivateAttribute("_distribution_strategy", "where slots are made; set for an optimizer that was made outside"),
    ),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer": (
        PrivateAttribute("_distribute_strategy", "tells a model of ours from others; adopted ones get it"),
        PrivateAttribute("_maybe_symbolic_build", "hooked: the first step of a model that runs eagerly builds it"),
        PrivateAttribute("_compile_loss", "whether a loss was compiled, for the error of a missing y"),
        PrivateAttribute("_assert_compile_called", "Keras's own error for a model that is not compiled", ("method_name",)),
        PrivateAttribute("_should_eval", "which epochs `validation_freq` picks", ("epoch", "validation_freq")),
        PrivateAttribute("_flatten_metrics_in_order", "what `train_on_batch` returns as a list", ("logs",)),
        PrivateAttribute("_initial_epoch", "where `BackupAndRestore` resumes"),
    ),
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function": (
        PrivateAttribute("_autograph", "whether a `tf.function` that a step calls converts Python's control flow"),
        PrivateAttribute("_jit_compile", "whether XLA compiles it"),
    ),
    "tensorflow.python.framework.func_graph:FuncGraph": (
        PrivateAttribute("_function_captures", "holds what is read when the function is called"),
        PrivateAttribute("_get_control_flow_context", "is a context of XLA's while a function is traced that XLA compiles"),
    ),
    "tensorflow.python.eager.context:Context": (
        PrivateAttribute("executor", "sends executions to a worker while it runs others"),
        PrivateAttribute("_config", "the configuration that tasks get when they are connected; nothing public sets all of it"),
        PrivateAttribute("_context_handle", "whether TensorFlow has been used in this process"),
        PrivateAttribute("_server_def", "set back when connecting fails"),
        PrivateAttribute("ensure_initialized", "what TensorFlow's own connect calls"),
        PrivateAttribute("config", "the options that TensorFlow runs with"),
        PrivateAttribute("get_server_def", "what the context is connected with"),
        PrivateAttribute("set_server_def", "starts the server of this process", ("server_def",)),
        PrivateAttribute("update_server_def", "adds the other tasks", ("server_def",)),
    ),
    "keras.src.layers.layer:Layer": (
        PrivateAttribute("_flatten_layers", "the models in a model, and whether all of it is built"),
        PrivateAttribute("_open_name_scope", "hooked: what a model of ours builds outside the scope, it builds in it"),
    ),
    "keras.src.backend.common.variables:Variable": (
        PrivateAttribute("_initialize", "overridden: the storage is made on a ps", ("value",)),
        PrivateAttribute("_initialize_with_initializer", "overridden: the value is computed on the ps", ("initializer",)),
        PrivateAttribute("_convert_to_tensor", "assignments take what Keras's take", ("value", "dtype")),
        PrivateAttribute("_maybe_autocast", "mixed precision casts the pulled value", ("value",)),
        PrivateAttribute("_value", "the storage"),
        PrivateAttribute("_shape", "as given, before there is a storage"),
        PrivateAttribute("_dtype", "as given, before there is a storage"),
        PrivateAttribute("_trainable", "as given, before there is a storage"),
        PrivateAttribute("_name", "as given, before there is a storage"),
        PrivateAttribute("_constraint", "hidden from the worker: the ps applies it"),
        PrivateAttribute("_regularizer", "of a table, it sees the rows of the step"),
    ),
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2": (
        PrivateAttribute("_extended", "replaced by ours, which places variables"),
        PrivateAttribute(
            "_connect_to_cluster", "overridden: the devices of this process keep their names", ("coordinator_name",)
        ),
        PrivateAttribute("_cluster_resolver", "names the protocol"),
        PrivateAttribute("_num_workers", "set by what is overridden"),
        PrivateAttribute("_num_ps", "as above"),
    ),
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended": (
        PrivateAttribute("_num_workers", "the number of workers"),
        PrivateAttribute("_num_ps", "the number of ps"),
        PrivateAttribute("_num_replicas_in_sync", "overridden: workers are not in sync, so a loss is not scaled"),
        PrivateAttribute("_use_merge_call", "overridden: an optimizer is applied within the step"),
        PrivateAttribute("_create_var_creator", "overridden: no caching or aggregation around a variable", ("next_creator",)),
        PrivateAttribute("_resource_creator_scope", "overridden: lookup tables are for `lookup_tables` to bring to workers"),
        PrivateAttribute("_create_variable", "overridden: places variables", ("next_creator",)),
        PrivateAttribute("_create_variable_round_robin", "overridden: places by bytes, shards too", ("next_creator",)),
        PrivateAttribute(
            "_update", "overridden: Keras applies weight decay through it", ("var", "fn", "args", "kwargs", "group")
        ),
    ),
    "tensorflow.python.distribute.distribute_lib:_DefaultDistributionExtended": (
        PrivateAttribute("_retrace_functions_for_each_device", "what a `tf.function` that is called in the scope asks for"),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:ClusterCoordinator": (
        PrivateAttribute("_create_per_worker_resources", "iterators that are made anew on a worker that comes back", ("fn",)),
        PrivateAttribute("_cluster", "schedules what runs in a worker's thread, not only a `tf.function`"),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Cluster": (
        PrivateAttribute("schedule", "as above", ("function", "args", "kwargs")),
        PrivateAttribute("closure_queue", "holds the error"),
        PrivateAttribute("workers", "which of them are lost"),
        PrivateAttribute("_potential_ps_failures_count", "set back by each result: TensorFlow counts for the life of a job"),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Worker": (
        PrivateAttribute("_is_dead_with_error", "whether the worker is lost, when an epoch begins"),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:_CoordinatedClosureQueue": (
        PrivateAttribute("_error", "whether the coordinator has failed, asked without waiting for what is in flight"),
    ),
    "tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction": (
        PrivateAttribute("_captured_inputs", "the handles that it was compiled with"),
        PrivateAttribute("set_external_captures", "replaces them", ("captures",)),
    ),
    "tensorflow.python.trackable.resource:CapturableResource": (
        PrivateAttribute("_resource_handle", "the handle"),
        PrivateAttribute("_resource_handle_value", "the handle, or None where there is none yet"),
        PrivateAttribute("_resource_device", "where it wants to be"),
        PrivateAttribute("_create_resource", "makes the resource, under its name"),
        PrivateAttribute("_initialize", "fills it"),
    ),
    "tensorflow.python.ops.summary_ops_v2:_ResourceSummaryWriter": (
        PrivateAttribute("_resource", "the handle"),
        PrivateAttribute("_closed", "whether it is of no use any more"),
    ),
    "keras.src.saving:saving_lib": (
        PrivateAttribute("save_model", "hooked: the file takes its place when it is whole", ("model", "filepath")),
        PrivateAttribute("save_weights_only", "hooked, as above", ("model", "filepath", "max_shard_size", "objects_to_skip")),
        PrivateAttribute("load_model", "hooked: large variables are read a piece at a time", ("filepath",)),
        PrivateAttribute("load_weights_only", "hooked, as above", ("model", "filepath")),
        PrivateAttribute("is_memory_sufficient", "hooked: large files are not made up in memory", ("model",)),
    ),
    "keras.src.legacy.saving:legacy_h5_format": (
        PrivateAttribute("save_model_to_hdf5", "hooked, as `save_model`", ("model", "filepath")),
    ),
    "tensorflow.python.saved_model:save": (
        PrivateAttribute("save_and_return_nodes", "hooked: what is traced here is for a SavedModel", ("obj", "export_dir")),
    ),
    "keras.src.saving.saving_lib:H5IOStore": (
        PrivateAttribute("_h5_entry_group", "where the entries of the layer at hand are"),
    ),
    "keras.src.callbacks.backup_and_restore:BackupAndRestore": (
        PrivateAttribute("_save_model", "hooked: weights, and where training stands, in one file"),
        PrivateAttribute("_load_model", "hooked, as above"),
        PrivateAttribute("_current_epoch", "where training stands"),
        PrivateAttribute("_last_batch_seen", "where training stands"),
        PrivateAttribute("_weights_path", "the file with the weights"),
        PrivateAttribute("_training_metadata_path", "the file that says where training stands"),
    ),
    "tensorflow.python.checkpoint.functional_saver:MultiDeviceSaver": (
        PrivateAttribute("save", "hooked: to an absolute path, by a device that sees it", ("file_prefix", "options")),
        PrivateAttribute("restore", "hooked, as above", ("file_prefix", "options")),
        PrivateAttribute("_shardable_tensors_by_task", "which tasks are to write or read"),
        PrivateAttribute("_registered_savers", "calls ours, and merges the files that it has written"),
    ),
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable": (
        PrivateAttribute("_unique_id", "what Keras itself finds slots by"),
        PrivateAttribute("_read_variable_op", "overridden: what reading ends in; a lost ps is named"),
        PrivateAttribute("_serialize_to_tensors", "a checkpoint of what is not in shards is TensorFlow's own"),
        PrivateAttribute("_restore_from_tensors", "as above", ("restored_tensors",)),
        PrivateAttribute("_copy_trackable_to_cpu", "copies for a checkpoint that is written later", ("object_map",)),
    ),
}


def owner_of(handle: Any) -> Any:
    """The lookup table, or other object, whose handle this is; None where it is gone, and for any other tensor.

    TensorFlow notes in the handle who made it, for `tf.saved_model.save`.
    """
    reference = getattr(handle, "_parent_trackable", None)
    return None if reference is None else reference()


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


def missing_attributes(owner: str) -> list[str]:
    """The attributes in `PRIVATE_ATTRIBUTES[owner]`, and the parameters of methods, that are no longer there.

    An attribute that only an instance has counts as there when a method of its class, or of a base of it, assigns it.
    """
    module, _, name = owner.partition(":")
    cls = getattr(importlib.import_module(module), name)
    missing = []
    for attribute in PRIVATE_ATTRIBUTES[owner]:
        if not hasattr(cls, attribute.name) and not _assigns(cls, attribute.name):
            missing.append(attribute.name)
        elif attribute.parameters:
            known = inspect.signature(getattr(cls, attribute.name)).parameters
            missing += [f"{attribute.name}({parameter})" for parameter in attribute.parameters if parameter not in known]
    return missing


def _assigns(cls: type, attribute: str) -> bool:
    pattern = re.compile(rf"\bself\.{attribute}\b(: [^=]+)? = ")
    return any(pattern.search(inspect.getsource(base)) for base in cls.__mro__ if base.__module__ != "builtins")


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
