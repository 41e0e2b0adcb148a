"""Lists the private attributes of Keras and TensorFlow that kerasps uses, and the reasons.

`kerasps._compat` imports this list. It holds only text, so that a task's server starts fast.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrivateAttribute:
    """A private attribute of an object of Keras or TensorFlow, and why kerasps needs it.

    Args:
        name: the name of the attribute.
        why: what kerasps needs it for. "overridden" as its first word: a class of kerasps overrides
            this method, and would no longer be called if the base renamed it.
        parameters: the names of the parameters that kerasps passes, or receives in an override.
    """

    name: str
    why: str
    parameters: tuple[str, ...] = ()

    @property
    def is_overridden(self) -> bool:
        """True if a class of kerasps overrides it."""
        return self.why.startswith("overridden")


# By "module:class"; "keras:Model/make_train_function" is the base of `keras.Model` that defines the
# method, since versions of Keras name it differently. The methods that kerasps patches or overrides
# are here too: if one is renamed, nothing calls ours, without an error.
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
            "variables with and without weight decay are updated separately",
            ("variable",),
        ),
        PrivateAttribute("_trainable_variables", "slots are lists parallel to it"),
        PrivateAttribute("_learning_rate", "the variable of it, unless there is a schedule"),
        PrivateAttribute("_accumulated_gradients", "the ps accumulate gradients"),
        PrivateAttribute(
            "_model_variables_moving_average", "each ps updates the averages of its variables"
        ),
        PrivateAttribute(
            "_iterations", "counts every call of `apply`; `iterations` skips those that accumulate"
        ),
    ),
    "keras.src.backend.tensorflow.optimizer:TFOptimizer": (
        PrivateAttribute(
            "_backend_update_step",
            "called on the ps, so that an optimizer's override of it runs",
            ("grads", "trainable_variables", "learning_rate"),
        ),
        PrivateAttribute("_apply_weight_decay", "weight decay runs on the ps", ("variables",)),
        PrivateAttribute(
            "_distribution_strategy",
            "makes slots; set for an optimizer that was made outside of the scope",
        ),
    ),
    "keras:Model/make_train_function": (
        PrivateAttribute(
            "_distribute_strategy", "tells a model of ours from others; adopted ones get it"
        ),
        PrivateAttribute(
            "_compile_loss", "tells if a loss was compiled, for the error about a missing y"
        ),
        PrivateAttribute(
            "_compile_metrics", "built before the first trace, which would otherwise be repeated"
        ),
        PrivateAttribute(
            "_flatten_metrics_in_order", "makes the list that `train_on_batch` returns", ("logs",)
        ),
        PrivateAttribute("_initial_epoch", "the epoch at which `BackupAndRestore` resumes"),
    ),
    "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function": (
        PrivateAttribute(
            "_autograph", "tells if a `tf.function` called by a step converts Python's control flow"
        ),
        PrivateAttribute("_jit_compile", "tells if XLA compiles it"),
    ),
    "tensorflow.python.framework.ops:Graph": (
        PrivateAttribute("_thread_local", "holds the strategies whose scopes a thread has entered"),
        PrivateAttribute("_distribution_strategy_stack", "as above, of the current thread"),
    ),
    "tensorflow.python.framework.ops:Operation": (
        PrivateAttribute(
            "_update_input", "makes the shard of an array read a slice of it", ("index", "tensor")
        ),
        PrivateAttribute("_set_device", "places scalars of a step off the GPU", ("device",)),
    ),
    "tensorflow.python.framework.func_graph:FuncGraph": (
        PrivateAttribute("_function_captures", "holds values that each call of the function reads"),
        PrivateAttribute(
            "_get_control_flow_context",
            "returns a context of XLA while a function that XLA compiles is being traced",
        ),
    ),
    "tensorflow.python.eager.context:Context": (
        PrivateAttribute("executor", "sends executions to a worker while it runs others"),
        PrivateAttribute(
            "_config",
            "the configuration that tasks get when they are connected; no public function sets all "
            "of it",
        ),
        PrivateAttribute(
            "_thread_local_data", "the scopes of a thread, restored after an interrupt"
        ),
        PrivateAttribute("context_switches", "as above"),
        PrivateAttribute(
            "call_function",
            "calls a function with flat arguments, in half the time",
            ("name", "tensor_inputs", "num_outputs"),
        ),
        PrivateAttribute(
            "function_call_options", "sets the optimization of functions that tasks run"
        ),
        PrivateAttribute("_context_handle", "tells if this process has used TensorFlow"),
        PrivateAttribute("_server_def", "reset when connecting fails"),
        PrivateAttribute("ensure_initialized", "TensorFlow's function to connect calls it"),
        PrivateAttribute("config", "the options that TensorFlow runs with"),
        PrivateAttribute(
            "_initialize_physical_devices", "prints that there is no GPU; `quiet_start` drops it"
        ),
        PrivateAttribute("_physical_devices", "tells if TensorFlow has looked for devices"),
        PrivateAttribute("get_server_def", "the cluster that the context is connected to"),
        PrivateAttribute(
            "set_server_def",
            "starts the server of this process",
            ("server_def", "keep_alive_secs"),
        ),
        PrivateAttribute(
            "update_server_def",
            "adds the other tasks, and removes workers and adds them again",
            ("server_def", "keep_alive_secs"),
        ),
    ),
    "keras.src.layers.layer:Layer": (
        PrivateAttribute(
            "_flatten_layers", "finds the models in a model, and layers that are not built"
        ),
    ),
    "keras.src.backend.common.variables:Variable": (
        PrivateAttribute("_initialize", "overridden: makes the storage on a ps", ("value",)),
        PrivateAttribute(
            "_initialize_with_initializer",
            "overridden: computes the value on the ps",
            ("initializer",),
        ),
        PrivateAttribute(
            "_convert_to_tensor", "assignments take the same values as Keras's", ("value", "dtype")
        ),
        PrivateAttribute("_maybe_autocast", "mixed precision casts the pulled value", ("value",)),
        PrivateAttribute("_value", "the storage"),
        PrivateAttribute("_shape", "the given one, before the storage exists"),
        PrivateAttribute("_dtype", "the given one, before the storage exists"),
        PrivateAttribute("_trainable", "the given one, before the storage exists"),
        PrivateAttribute("_name", "the given one, before the storage exists"),
        PrivateAttribute("_constraint", "hidden from the worker: the ps applies it"),
        PrivateAttribute("_regularizer", "for a table, it gets the rows of the step"),
    ),
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2": (
        PrivateAttribute("_extended", "replaced by ours, which places variables"),
        PrivateAttribute(
            "_connect_to_cluster",
            "overridden: the devices of this process keep their names",
            ("coordinator_name",),
        ),
        PrivateAttribute("_cluster_resolver", "names the protocol"),
        PrivateAttribute("_num_workers", "set by the overridden method"),
        PrivateAttribute("_num_ps", "as above"),
    ),
    "tensorflow.python.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended": (
        PrivateAttribute("_num_workers", "the number of workers"),
        PrivateAttribute("_num_ps", "the number of ps"),
        PrivateAttribute(
            "_num_replicas_in_sync",
            "overridden: workers are not in sync; a loss is scaled by the devices of one worker",
        ),
        PrivateAttribute("_use_merge_call", "overridden: the step applies the optimizer"),
        PrivateAttribute(
            "_create_var_creator",
            "overridden: no caching or aggregation around a variable",
            ("next_creator",),
        ),
        PrivateAttribute(
            "_resource_creator_scope",
            "overridden: `lookup_tables` brings lookup tables to workers",
        ),
        PrivateAttribute(
            "_container_strategy", "the strategy in whose replica a function runs", ()
        ),
        PrivateAttribute(
            "_call_for_each_replica",
            "overridden: `strategy.run` in a traced function runs a step",
            ("fn", "args", "kwargs"),
        ),
        PrivateAttribute("_create_variable", "overridden: places variables", ("next_creator",)),
        PrivateAttribute(
            "_create_variable_round_robin",
            "overridden: places variables and shards by their bytes",
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
            "overridden: makes a variable on the parameter device",
            ("next_creator",),
        ),
        PrivateAttribute(
            "_use_merge_call", "overridden: the replicas meet for an update, which runs once"
        ),
        PrivateAttribute(
            "_call_for_each_replica",
            "overridden: raises an error for steps that XLA cannot compile",
            ("fn", "args", "kwargs"),
        ),
    ),
    "tensorflow.python.distribute.mirrored_strategy:MirroredStrategy": (
        PrivateAttribute("_collective_key_base", "its extended reads it from the strategy"),
    ),
    "tensorflow.python.distribute.values:MirroredVariable": (
        PrivateAttribute(
            "_get_replica", "overridden: all replicas have the same value", ("replica_id",)
        ),
        PrivateAttribute(
            "_update_replica",
            "overridden: takes the first replica's value if there is no aggregation",
            ("update_fn", "value"),
        ),
        PrivateAttribute("_update_cross_replica", "does the update", ("update_fn", "value")),
        PrivateAttribute("_primary", "the value"),
    ),
    "tensorflow.python.distribute.distribute_lib:_DefaultDistributionExtended": (
        PrivateAttribute(
            "_retrace_functions_for_each_device",
            "a `tf.function` that is called in the scope reads it",
        ),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:ClusterCoordinator": (
        PrivateAttribute(
            "_cluster", "schedules any function in a worker's thread, not only a `tf.function`"
        ),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Closure": (
        PrivateAttribute("_concrete_function", "the traced function, whose pushes are known"),
        PrivateAttribute("_function", "set to a variant that skips updates that were applied"),
        PrivateAttribute(
            "maybe_call_with_output_remote_value",
            "sets the error of a closed cluster on a closure's result",
            ("method",),
        ),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:_CoordinatedClosureQueue": (
        PrivateAttribute("_queue", "the pending closures when the cluster is closed"),
        PrivateAttribute("_tagged_queue", "the pending closures of one worker"),
        PrivateAttribute("_cancellation_mgr", "read by the code that makes a closure"),
        PrivateAttribute("stop", "ends it when the cluster is closed", ()),
        PrivateAttribute("put", "ours has the same signature", ("closure", "tag")),
        PrivateAttribute("put_back", "as above", ("closure",)),
        PrivateAttribute("get", "as above", ("timeout", "tag")),
        PrivateAttribute("mark_finished", "as above", ()),
        PrivateAttribute("mark_failed", "as above", ("e",)),
        PrivateAttribute("clear_tag_unlocked", "as above", ("tag",)),
        PrivateAttribute("wait", "as above", ("timeout",)),
        PrivateAttribute("done", "as above", ()),
    ),
    "tensorflow.python.distribute.coordinator.values:RemoteValueImpl": (
        PrivateAttribute("_set_error", "sets the error that `fetch` raises", ("error",)),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:Cluster": (
        PrivateAttribute("schedule", "as above", ("function", "args", "kwargs")),
        PrivateAttribute("closure_queue", "replaced by ours when the cluster is closed"),
        PrivateAttribute("failure_handler", "replaced by ours"),
        PrivateAttribute("workers", "each has the failure handler too; a new worker is added"),
        PrivateAttribute("_num_workers", "incremented for a new worker"),
        PrivateAttribute(
            "_record_and_ignore_transient_ps_failure", "called as TensorFlow's handler does", ("e",)
        ),
        PrivateAttribute(
            "_record_and_ignore_transient_timeouts", "called as TensorFlow's handler does", ("e",)
        ),
    ),
    "tensorflow.python.distribute.coordinator.cluster_coordinator:WorkerPreemptionHandler": (
        PrivateAttribute("stop", "ends the one that ours replaces", ()),
        PrivateAttribute(
            "wait_on_failure",
            "ours has the same signature",
            ("on_failure_fn", "on_transient_failure_fn", "on_recovery_fn", "worker_device_name"),
        ),
    ),
    "tensorflow.python.eager.polymorphic_function.concrete_function:ConcreteFunction": (
        PrivateAttribute("_captured_inputs", "the handles that it was traced with"),
        PrivateAttribute("set_external_captures", "replaces them", ("captures",)),
    ),
    "tensorflow.python.data.ops.dataset_ops:DatasetV2": (
        PrivateAttribute("_inputs", "the datasets that it is made from"),
        PrivateAttribute("_functions", "the functions that it calls"),
        PrivateAttribute("_variant_tensor_attr", "the dataset's tensor, replaced by a new one"),
    ),
    "tensorflow.python.trackable.resource:CapturableResource": (
        PrivateAttribute("_resource_handle", "the handle"),
        PrivateAttribute("_resource_handle_value", "the handle, or None before it exists"),
        PrivateAttribute("_resource_device", "the device on which it makes the resource"),
        PrivateAttribute("_create_resource", "makes the resource, under its name"),
        PrivateAttribute("_initialize", "fills it"),
    ),
    "tensorflow.python.ops.summary_ops_v2:_ResourceSummaryWriter": (
        PrivateAttribute("_resource", "the handle"),
        PrivateAttribute("_closed", "tells if it is closed"),
    ),
    "keras.src.saving.saving_lib:H5IOStore": (
        PrivateAttribute("_h5_entry_group", "holds the entries of the current layer"),
    ),
    "keras.src.callbacks.backup_and_restore:BackupAndRestore": (
        PrivateAttribute("_current_epoch", "the current epoch"),
        PrivateAttribute("_last_batch_seen", "the current batch"),
        PrivateAttribute("_weights_path", "the file with the weights"),
        PrivateAttribute("_training_metadata_path", "the file with the epoch and the batch"),
    ),
    "keras.src.callbacks.swap_ema_weights:SwapEMAWeights": (
        PrivateAttribute(
            "_ema_weights_in_model", "tells if a backup between epochs holds the averages"
        ),
    ),
    "tensorflow.python.checkpoint.functional_saver:MultiDeviceSaver": (
        PrivateAttribute("_shardable_tensors_by_task", "the tasks that write or read"),
        PrivateAttribute(
            "_registered_savers", "calls our saver, and merges the files it has written"
        ),
    ),
    "tensorflow.python.ops.resource_variable_ops:BaseResourceVariable": (
        PrivateAttribute("_handle", "replaced if this process had another server before"),
        PrivateAttribute("_unique_id", "Keras finds slots by it"),
        PrivateAttribute(
            "_read_variable_op", "overridden: every read calls it; its error names a lost ps"
        ),
        PrivateAttribute(
            "_serialize_to_tensors", "TensorFlow writes checkpoints of variables without shards"
        ),
        PrivateAttribute("_restore_from_tensors", "as above", ("restored_tensors",)),
        PrivateAttribute(
            "_copy_trackable_to_cpu",
            "makes the copy for a checkpoint that is written later",
            ("object_map",),
        ),
    ),
}


@dataclass(frozen=True)
class PrivateText:
    """A text in Keras's or TensorFlow's source that kerasps relies on.

    Args:
        module: the module whose source contains it.
        text: the text.
        why: what kerasps recognises by it.
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
    PrivateText(_COORDINATOR, "unknown device", "a task that was restarted"),
    PrivateText(_COORDINATOR, "Unable to find the relevant tensor remote_handle", "as above"),
    PrivateText(_COORDINATOR, "/job:worker", "an error that TensorFlow takes for a lost worker"),
    PrivateText("tensorflow.python.ops.control_flow_v2_func_graphs", "class WhileBodyFuncGraph(",
                "the graph of a loop has `While` in the name of its class"),
    PrivateText(_VARIABLES, 'hasattr(handle, "_name") and isinstance(handle._name, str)',
                "a variable made from a handle gets the handle's name"),
    PrivateText(_VARIABLES, 'getattr(handle, "_unique_id", None)',
                "and its id, by which Keras finds slots"),
    PrivateText("keras.src.random.seed_generator", 'name="seed_generator_state"',
                "the variable of a seed generator"),
    PrivateText("tensorflow.python.autograph.impl.api", "hasattr(e, 'ag_pass_through')",
                "AutoGraph passes our errors on unchanged"),
    PrivateText(_OPTIMIZER, 'name="iteration"', "the variable that counts an optimizer's steps"),
    PrivateText(_OPTIMIZER, 'name="learning_rate"', "the variable of an optimizer's learning rate"),
    PrivateText("keras.src.metrics.metric", 'synchronization="on_read"',
                "the state of a metric, which is summed over workers"),
)
# fmt: on
