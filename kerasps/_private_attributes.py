"""The private attributes of objects of Keras and TensorFlow that kerasps uses, and why.

`kerasps._compat` imports the list, which holds text only, so that a task's server starts fast.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrivateAttribute:
    """A private attribute of an object of Keras or TensorFlow, and why kerasps needs it.

    Args:
        name: what it is called.
        why: what kerasps needs it for. "overridden" as its first word: a class of kerasps has a
            method of this name, which would not be called if the base's had another.
        parameters: the names of the parameters that kerasps passes, or is passed.
    """

    name: str
    why: str
    parameters: tuple[str, ...] = ()

    @property
    def is_overridden(self) -> bool:
        """True if a class of kerasps overrides it."""
        return self.why.startswith("overridden")


# By "module:class". What kerasps hooks or overrides is here too: under another name it would
# silently no longer be called.
PRIVATE_ATTRIBUTES: dict[str, tuple[PrivateAttribute, ...]] = {
    "keras.src.optimizers.base_optimizer:BaseOptimizer": (
        PrivateAttribute(
            "_clip_gradients",
            "clipping stays on the worker, or follows accumulation on the ps",
            ("grads",),
        ),
        PrivateAttribute(
            "_get_variable_index", "finds the accumulator of a variable", ("variable",)
        ),
        PrivateAttribute(
            "_use_weight_decay",
            "variables that decay are updated apart from those that do not",
            ("variable",),
        ),
        PrivateAttribute("_trainable_variables", "slots are lists parallel to it"),
        PrivateAttribute("_learning_rate", "the variable of it, where there is no schedule"),
        PrivateAttribute("_accumulated_gradients", "gradient accumulation goes on on the ps"),
        PrivateAttribute(
            "_model_variables_moving_average", "each ps moves the averages of its own variables"
        ),
        PrivateAttribute(
            "_iterations", "counts every call of `apply`; `iterations` leaves accumulating ones out"
        ),
    ),
    "keras.src.backend.tensorflow.optimizer:TFOptimizer": (
        PrivateAttribute(
            "_backend_update_step",
            "called on the ps, so that an optimizer's own override runs",
            ("grads", "trainable_variables", "learning_rate"),
        ),
        PrivateAttribute("_apply_weight_decay", "weight decay runs on the ps", ("variables",)),
        PrivateAttribute(
            "_distribution_strategy",
            "where slots are made; set for an optimizer that was made outside",
        ),
    ),
    "keras.src.backend.tensorflow.trainer:TensorFlowTrainer": (
        PrivateAttribute(
            "_distribute_strategy", "tells a model of ours from others; adopted ones get it"
        ),
        PrivateAttribute(
            "_compile_loss", "whether a loss was compiled, for the error of a missing y"
        ),
        PrivateAttribute(
            "_compile_metrics", "built before the first trace, which would otherwise be repeated"
        ),
        PrivateAttribute(
            "_flatten_metrics_in_order", "what `train_on_batch` returns as a list", ("logs",)
        ),
        PrivateAttribute("_initial_epoch", "where `BackupAndRestore` resumes"),
    ),
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function": (
        PrivateAttribute(
            "_autograph", "whether a `tf.function` that a step calls converts Python's control flow"
        ),
        PrivateAttribute("_jit_compile", "whether XLA compiles it"),
    ),
    "tensorflow.python.framework.ops:Graph": (
        PrivateAttribute("_thread_local", "holds the strategies whose scopes a thread is in"),
        PrivateAttribute("_distribution_strategy_stack", "as above, of the current thread"),
    ),
    "tensorflow.python.framework.ops:Operation": (
        PrivateAttribute(
            "_update_input", "the shard of an array reads a slice of it", ("index", "tensor")
        ),
        PrivateAttribute("_set_device", "scalars of a step stay off a GPU", ("device",)),
    ),
    "tensorflow.python.framework.func_graph:FuncGraph": (
        PrivateAttribute("_function_captures", "holds what is read when the function is called"),
        PrivateAttribute(
            "_get_control_flow_context",
            "is a context of XLA's while a function is traced that XLA compiles",
        ),
    ),
    "tensorflow.python.eager.context:Context": (
        PrivateAttribute("executor", "sends executions to a worker while it runs others"),
        PrivateAttribute(
            "_config",
            "the configuration that tasks get when they are connected; nothing public sets all of "
            "it",
        ),
        PrivateAttribute(
            "_thread_local_data", "the scopes of a thread, put back after an interrupt"
        ),
        PrivateAttribute("context_switches", "as above"),
        PrivateAttribute(
            "call_function",
            "calls a function whose arguments are flat already, in half the time",
            ("name", "tensor_inputs", "num_outputs"),
        ),
        PrivateAttribute("function_call_options", "how functions are optimized that tasks run"),
        PrivateAttribute("_context_handle", "whether TensorFlow has been used in this process"),
        PrivateAttribute("_server_def", "set back when connecting fails"),
        PrivateAttribute("ensure_initialized", "what TensorFlow's own connect calls"),
        PrivateAttribute("config", "the options that TensorFlow runs with"),
        PrivateAttribute(
            "_initialize_physical_devices", "prints that there is no GPU; `quiet_start` drops it"
        ),
        PrivateAttribute("_physical_devices", "whether TensorFlow has looked for devices"),
        PrivateAttribute("get_server_def", "what the context is connected with"),
        PrivateAttribute(
            "set_server_def",
            "starts the server of this process",
            ("server_def", "keep_alive_secs"),
        ),
        PrivateAttribute(
            "update_server_def",
            "adds the other tasks, and takes workers out and back",
            ("server_def", "keep_alive_secs"),
        ),
    ),
    "keras.src.layers.layer:Layer": (
        PrivateAttribute(
            "_flatten_layers", "the models in a model, and whether all of it is built"
        ),
    ),
    "keras.src.backend.common.variables:Variable": (
        PrivateAttribute("_initialize", "overridden: the storage is made on a ps", ("value",)),
        PrivateAttribute(
            "_initialize_with_initializer",
            "overridden: the value is computed on the ps",
            ("initializer",),
        ),
        PrivateAttribute(
            "_convert_to_tensor", "assignments take what Keras's take", ("value", "dtype")
        ),
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
            "_connect_to_cluster",
            "overridden: the devices of this process keep their names",
            ("coordinator_name",),
        ),
        PrivateAttribute("_cluster_resolver", "names the protocol"),
        PrivateAttribute("_num_workers", "set by what is overridden"),
        PrivateAttribute("_num_ps", "as above"),
    ),
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended": (
        PrivateAttribute("_num_workers", "the number of workers"),
        PrivateAttribute("_num_ps", "the number of ps"),
        PrivateAttribute(
            "_num_replicas_in_sync",
            "overridden: workers are not in sync; a loss is scaled by the devices of one",
        ),
        PrivateAttribute("_use_merge_call", "overridden: an optimizer is applied within the step"),
        PrivateAttribute(
            "_create_var_creator",
            "overridden: no caching or aggregation around a variable",
            ("next_creator",),
        ),
        PrivateAttribute(
            "_resource_creator_scope",
            "overridden: lookup tables are for `lookup_tables` to bring to workers",
        ),
        PrivateAttribute(
            "_container_strategy", "the strategy, whose replica a function runs in", ()
        ),
        PrivateAttribute(
            "_call_for_each_replica",
            "overridden: what `strategy.run` runs in a traced function is a step",
            ("fn", "args", "kwargs"),
        ),
        PrivateAttribute("_create_variable", "overridden: places variables", ("next_creator",)),
        PrivateAttribute(
            "_create_variable_round_robin",
            "overridden: places by bytes, shards too",
            ("next_creator",),
        ),
        PrivateAttribute(
            "_update",
            "overridden: Keras applies weight decay through it",
            ("var", "fn", "args", "kwargs", "group"),
        ),
    ),
    "tensorflow.python.distribute.mirrored_strategy:MirroredExtended": (
        PrivateAttribute("_devices", "the compute devices"),
        PrivateAttribute("_container_strategy", "the strategy that it belongs to", ()),
        PrivateAttribute(
            "_create_variable",
            "overridden: a variable is made on the parameter device",
            ("next_creator",),
        ),
        PrivateAttribute(
            "_use_merge_call", "overridden: the replicas meet for an update, which is done once"
        ),
        PrivateAttribute(
            "_call_for_each_replica",
            "overridden: refuses what XLA cannot compile",
            ("fn", "args", "kwargs"),
        ),
    ),
    "tensorflow.python.distribute.mirrored_strategy:MirroredStrategy": (
        PrivateAttribute("_collective_key_base", "its extended asks for it, of ours too"),
    ),
    "tensorflow.python.distribute.values:MirroredVariable": (
        PrivateAttribute(
            "_get_replica", "overridden: all replicas have the same value", ("replica_id",)
        ),
        PrivateAttribute(
            "_update_replica",
            "overridden: without an aggregation, the first replica's value is taken",
            ("update_fn", "value"),
        ),
        PrivateAttribute("_update_cross_replica", "does the update", ("update_fn", "value")),
        PrivateAttribute("_primary", "the value"),
    ),
    "tensorflow.python.distribute.distribute_lib:_DefaultDistributionExtended": (
        PrivateAttribute(
            "_retrace_functions_for_each_device",
            "what a `tf.function` that is called in the scope asks for",
        ),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:ClusterCoordinator": (
        PrivateAttribute(
            "_cluster", "schedules what runs in a worker's thread, not only a `tf.function`"
        ),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Closure": (
        PrivateAttribute("_concrete_function", "the traced function, of which pushes are known"),
        PrivateAttribute("_function", "set to a twin that leaves out what was applied"),
        PrivateAttribute(
            "maybe_call_with_output_remote_value",
            "gives what a closure returns the error of a closed cluster",
            ("method",),
        ),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:_CoordinatedClosureQueue": (
        PrivateAttribute("_queue", "closures that wait when the cluster is closed"),
        PrivateAttribute("_tagged_queue", "those that wait for one worker"),
        PrivateAttribute("_cancellation_mgr", "asked for by whoever makes a closure"),
        PrivateAttribute("stop", "ends it when the cluster is closed", ()),
        PrivateAttribute("put", "ours is called as it", ("closure", "tag")),
        PrivateAttribute("put_back", "as above", ("closure",)),
        PrivateAttribute("get", "as above", ("timeout", "tag")),
        PrivateAttribute("mark_finished", "as above", ()),
        PrivateAttribute("mark_failed", "as above", ("e",)),
        PrivateAttribute("clear_tag_unlocked", "as above", ("tag",)),
        PrivateAttribute("wait", "as above", ("timeout",)),
        PrivateAttribute("done", "as above", ()),
    ),
    "tensorflow.python.distribute.coordinator.values:RemoteValueImpl": (
        PrivateAttribute("_set_error", "what `fetch` raises for a closed cluster", ("error",)),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Cluster": (
        PrivateAttribute("schedule", "as above", ("function", "args", "kwargs")),
        PrivateAttribute("closure_queue", "ours takes its place when the cluster is closed"),
        PrivateAttribute("failure_handler", "ours takes the place of TensorFlow's"),
        PrivateAttribute("workers", "each has the failure handler too; one that joins is added"),
        PrivateAttribute("_num_workers", "counted up for one that joins"),
        PrivateAttribute(
            "_record_and_ignore_transient_ps_failure", "called as TensorFlow's handler does", ("e",)
        ),
        PrivateAttribute(
            "_record_and_ignore_transient_timeouts", "called as TensorFlow's handler does", ("e",)
        ),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:WorkerPreemptionHandler": (
        PrivateAttribute("stop", "ends the one that ours takes the place of", ()),
        PrivateAttribute(
            "wait_on_failure",
            "ours is called as it",
            ("on_failure_fn", "on_transient_failure_fn", "on_recovery_fn", "worker_device_name"),
        ),
    ),
    "tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction": (
        PrivateAttribute("_captured_inputs", "the handles that it was compiled with"),
        PrivateAttribute("set_external_captures", "replaces them", ("captures",)),
    ),
    "tensorflow.python.data.ops.dataset_ops:DatasetV2": (
        PrivateAttribute("_inputs", "the datasets that it is made from"),
        PrivateAttribute("_functions", "the functions that it calls"),
        PrivateAttribute("_variant_tensor_attr", "the dataset itself, replaced by one made again"),
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
    "keras.src.saving.saving_lib:H5IOStore": (
        PrivateAttribute("_h5_entry_group", "where the entries of the layer at hand are"),
    ),
    "keras.src.callbacks.backup_and_restore:BackupAndRestore": (
        PrivateAttribute("_current_epoch", "where training stands"),
        PrivateAttribute("_last_batch_seen", "where training stands"),
        PrivateAttribute("_weights_path", "the file with the weights"),
        PrivateAttribute("_training_metadata_path", "the file that says where training stands"),
    ),
    "keras.src.callbacks.swap_ema_weights:SwapEMAWeights": (
        PrivateAttribute(
            "_ema_weights_in_model", "whether a backup between epochs is one of the averages"
        ),
    ),
    "tensorflow.python.checkpoint.functional_saver:MultiDeviceSaver": (
        PrivateAttribute("_shardable_tensors_by_task", "which tasks are to write or read"),
        PrivateAttribute(
            "_registered_savers", "calls ours, and merges the files that it has written"
        ),
    ),
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable": (
        PrivateAttribute("_handle", "replaced, where this process had another server before"),
        PrivateAttribute("_unique_id", "what Keras itself finds slots by"),
        PrivateAttribute(
            "_read_variable_op", "overridden: what reading ends in; a lost ps is named"
        ),
        PrivateAttribute(
            "_serialize_to_tensors", "a checkpoint of what is not in shards is TensorFlow's own"
        ),
        PrivateAttribute("_restore_from_tensors", "as above", ("restored_tensors",)),
        PrivateAttribute(
            "_copy_trackable_to_cpu",
            "copies for a checkpoint that is written later",
            ("object_map",),
        ),
    ),
}


@dataclass(frozen=True)
class PrivateText:
    """Words of Keras's or TensorFlow's own by which kerasps knows something.

    Args:
        module: the module whose source has them.
        text: the words.
        why: what kerasps knows by them.
    """

    module: str
    text: str
    why: str


_COORDINATOR = "tensorflow.python.distribute.coordinator.cluster_coordinator"
_VARIABLES = "tensorflow.python.ops.resource_variable_ops"
_OPTIMIZER = "keras.src.optimizers.base_optimizer"

# fmt: off
PRIVATE_TEXTS: tuple[PrivateText, ...] = (
    PrivateText(_COORDINATOR, "GRPC error information from remote target /job:ps",
                "an error that came from a ps"),
    PrivateText(_COORDINATOR, "unknown device", "a task that was started anew"),
    PrivateText(_COORDINATOR, "Unable to find the relevant tensor remote_handle", "as above"),
    PrivateText(_COORDINATOR, "/job:worker", "an error that TensorFlow takes for a lost worker"),
    PrivateText("tensorflow.python.ops.control_flow_v2_func_graphs", "class WhileBodyFuncGraph(",
                "the graph of a loop has `While` in the name of its class"),
    PrivateText(_VARIABLES, 'hasattr(handle, "_name") and isinstance(handle._name, str)',
                "a variable that is made from a handle has the handle's name"),
    PrivateText(_VARIABLES, 'getattr(handle, "_unique_id", None)',
                "and its id, by which Keras finds slots"),
    PrivateText("keras.src.random.seed_generator", 'name="seed_generator_state"',
                "the variable of a seed generator"),
    PrivateText("tensorflow.python.autograph.impl.api", "hasattr(e, 'ag_pass_through')",
                "AutoGraph leaves our errors as they are"),
    PrivateText(_OPTIMIZER, 'name="iteration"', "the variable that counts an optimizer's steps"),
    PrivateText(_OPTIMIZER, 'name="learning_rate"', "the variable of an optimizer's learning rate"),
    PrivateText("keras.src.metrics.metric", 'synchronization="on_read"',
                "the state of a metric, which is added up"),
)
# fmt: on
