"""Lists the private names and attributes of Keras and TensorFlow that kerasps uses, one a row.

`kerasps._compat` imports this list. It holds only text, so that a task's server starts fast.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """A part of kerasps, which needs private names of Keras and TensorFlow.

    Args:
        name: its name in errors.
        entries: the functions that users call for it, as "module:name". If a row of the feature is
            missing, they raise an error. A feature without entries raises it where it uses the
            name.
        is_dispensable: True if all works without it; the warning at the start names it.
    """

    name: str
    entries: tuple[str, ...] = ()
    is_dispensable: bool = False


# The strategy is not made without what this one needs. Without another one, it is made.
FIT = Feature("`fit`")
BACKUPS = Feature("`BackupAndRestore`", ("keras:callbacks.BackupAndRestore.on_train_begin",))
CENTRAL = Feature("`CentralStorageStrategy`")
CHECKPOINTS = Feature(
    "`tf.train.Checkpoint`",
    ("tensorflow:train.Checkpoint.write", "tensorflow:train.Checkpoint.read"),
)
CUSTOM_LOOPS = Feature(
    "`ClusterCoordinator.schedule`",
    ("tensorflow:distribute.coordinator.ClusterCoordinator.schedule",),
)
EARLIER_OBJECTS = Feature("an object on the cluster that was made before the strategy")
EAGER_STEPS = Feature("`run_eagerly`", ("kerasps.training:run_eagerly",))
EMBEDDING_LOOKUPS = Feature(
    "`tf.nn.embedding_lookup`",
    ("tensorflow:nn.embedding_lookup", "tensorflow:nn.embedding_lookup_sparse"),
)
EXPORTS = Feature("`Model.export` and `tf.saved_model.save`", ("tensorflow:saved_model.save",))
FILES = Feature(
    "saving and loading models",
    (
        *("keras:Model.save", "keras:Model.save_weights", "keras:Model.load_weights"),
        *("keras:saving.save_model", "keras:saving.load_model"),
    ),
)
FUNCTIONS = Feature("a `tf.function` with AutoGraph that a step calls")
GRADIENTS = Feature("`tf.gradients`", ("tensorflow:gradients",))
MESSAGES = Feature("short and clear messages", is_dispensable=True)
RANDOM_FUNCTIONS = Feature("a function in a step that draws random numbers")
RECURRENT = Feature("recurrent layers", ("keras:layers.GRU.call", "keras:layers.LSTM.call"))
SUMMARIES = Feature("`model.summary()` of tables without a vocabulary", is_dispensable=True)
TRACES = Feature("traces of tasks", ("kerasps.tools.tracing:Trace.on_train_begin",))
VALIDATION_SPLIT = Feature("`validation_split`")


@dataclass(frozen=True)
class Row:
    """A private name or attribute, and why kerasps needs it.

    Args:
        name: the name in `kerasps._compat`, or the name of the attribute.
        where: for a name "module:attribute" or "module", for an attribute its "module:class".
        feature: what does not work without it. `FIT` ends the start.
        why: what kerasps needs it for. "overridden" as its first word: a class of kerasps overrides
            this method, and would no longer be called if the base renamed it.
        parameters: the names of the parameters that kerasps passes, or receives in an override.
        later: where it is in later versions, if it has moved.
    """

    name: str
    where: str
    feature: Feature
    why: str
    parameters: tuple[str, ...] = ()
    later: str = ""

    @property
    def is_overridden(self) -> bool:
        """True if a class of kerasps overrides it."""
        return self.why.startswith("overridden")


@dataclass(frozen=True)
class PrivateText:
    """A text in Keras's or TensorFlow's source that kerasps relies on."""

    module: str
    text: str
    why: str


_K = "keras.src"
_T = "tensorflow.python"
_C = f"{_T}.distribute.coordinator.cluster_coordinator"
_VARIABLES = "tensorflow.python.ops.resource_variable_ops"
_OPTIMIZERS = "keras.src.optimizers.base_optimizer"

_OPTIMIZER = "keras:optimizers.Optimizer"
_MODEL = "keras:Model"
_FUNCTION = f"{_T}.eager.polymorphic_function.polymorphic_function:Function"
_GRAPH = "tensorflow:Graph"
_OPERATION = "tensorflow:Operation"
_FUNC_GRAPH = "tensorflow:__internal__.FuncGraph"
_CONTEXT = f"{_T}.eager.context:Context"
_LAYER = "keras:layers.Layer"
_VARIABLE = "keras:Variable"
_STRATEGY = "tensorflow:distribute.ParameterServerStrategy"
_EXTENDED = f"{_T}.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended"
_MIRRORED_EXTENDED = f"{_T}.distribute.mirrored_strategy:MirroredExtended"
_MIRRORED_STRATEGY = "tensorflow:distribute.MirroredStrategy"
_MIRRORED_VARIABLE = f"{_T}.distribute.values:MirroredVariable"
_DEFAULT_DISTRIBUTION_EXTENDED = f"{_T}.distribute.distribute_lib:_DefaultDistributionExtended"
_CLUSTER_COORDINATOR = "tensorflow:distribute.coordinator.ClusterCoordinator"
_CLOSURE = f"{_C}:Closure"
_QUEUE = f"{_C}:_CoordinatedClosureQueue"
_REMOTE_VALUE_IMPL = f"{_T}.distribute.coordinator.values:RemoteValueImpl"
_CLUSTER = f"{_C}:Cluster"
_HANDLER = f"{_C}:WorkerPreemptionHandler"
_CONCRETE_FUNCTION = f"{_T}.eager.polymorphic_function.concrete_function:ConcreteFunction"
_DATASET = "tensorflow:data.Dataset"
_RESOURCE = f"{_T}.trackable.resource:CapturableResource"
_RESOURCE_SUMMARY_WRITER = f"{_T}.ops.summary_ops_v2:_ResourceSummaryWriter"
_H5IOSTORE = f"{_K}.saving.saving_lib:H5IOStore"
_BACKUP = "keras:callbacks.BackupAndRestore"
_SWAP_EMAWEIGHTS = "keras:callbacks.SwapEMAWeights"
_MULTI_DEVICE_SAVER = f"{_T}.checkpoint.functional_saver:MultiDeviceSaver"
_TF_VARIABLE = f"{_T}.ops.resource_variable_ops:ResourceVariable"

# One call per row, as a table.
# fmt: off
_NAMES = (
    Row("train_validation_split",
        f"{_K}.trainers.data_adapters.array_slicing:train_validation_split", VALIDATION_SPLIT,
        "`validation_split` of arrays", ("arrays", "validation_split")),
    Row("data_adapters", f"{_K}.trainers:data_adapters", FIT,
        "reads generators, `PyDataset`s and loaders as Keras does"),
    Row("in_symbolic_scope", f"{_K}.backend.common.symbolic_scope:in_symbolic_scope", FIT,
        "detects the call that builds a model in its first step: it computes only shapes, and does "
        "not show which variables the step reads"),
    Row("get_stateless_scope", f"{_K}.backend.common.stateless_scope:get_stateless_scope", FIT,
        "a value that `keras.StatelessScope` holds replaces the value of a step"),
    Row("record_variable_access", f"{_T}.pywrap_tfe:TFE_Py_TapeVariableAccessed", FIT,
        "tells a GradientTape that a variable was read when a step gets its pulled value"),
    Row("record_variable_access_to_watchers",
        f"{_T}.pywrap_tfe:TFE_Py_VariableWatcherVariableAccessed", FIT, "tells a "
        "`tf.custom_gradient` that its function has read a variable"),
    Row("record_operation", f"{_T}.eager.record:record_operation", FIT, "tells a GradientTape that "
        "the rows of a lookup depend on the table",
        ("op_type", "output_tensors", "input_tensors", "backward_function")),
    Row("in_xla_context", f"{_T}.ops.control_flow_util:InXlaContext", FIT,
        "tells if XLA will compile the function that is being traced; XLA takes no variables of "
        "other machines", ("graph",)),
    Row("ParameterServerStrategyV2Extended",
        f"{_T}.distribute.parameter_server_strategy_v2:ParameterServerStrategyV2Extended", FIT,
        "chooses the ps of a variable; the public strategy offers no other way",
        ("container_strategy", "cluster_resolver", "variable_partitioner")),
    Row("MirroredExtended", f"{_T}.distribute.mirrored_strategy:MirroredExtended", CENTRAL, "runs "
        "replicas; `CentralStorageStrategy` differs in the device of variables",
        ("container_strategy", "devices", "cross_device_ops")),
    Row("MirroredVariable", f"{_T}.distribute.values:MirroredVariable", CENTRAL,
        "ours has one value for all replicas"),
    Row("SyncOnReadVariable", f"{_T}.distribute.values:SyncOnReadVariable", CENTRAL,
        "ours converts to numbers and arrays"),
    Row("create_mirrored_variable", f"{_T}.distribute.distribute_utils:create_mirrored_variable",
        CENTRAL, "makes the variable around its values, as the mirrored strategy does",
        ("strategy", "real_mirrored_creator", "class_mapping", "policy_mapping")),
    Row("ResourceVariable", f"{_T}.ops.resource_variable_ops:ResourceVariable", FIT, "the class of "
        "a `tf.Variable`; made from a handle, it can have a name on its task",
        ("trainable", "shape", "dtype", "handle")),
    Row("create_handle_data", f"{_T}.ops.handle_data_util:create_handle_data", FIT,
        "the shape and dtype of a variable that is made from a handle", ("shape", "dtype")),
    Row("set_handle_data", f"{_T}.ops.handle_data_util:set_handle_data", FIT,
        "gives such a variable its shape and dtype", ("target_t", "handle_data")),
    Row("NativeObject", f"{_T}.types.internal:NativeObject", EMBEDDING_LOOKUPS,
        "`tf.nn.embedding_lookup` passes such objects unchanged to the lookup, and reads others "
        "whole"),
    Row("embedding_ops", f"{_T}.ops:embedding_ops", EMBEDDING_LOOKUPS, "lookups of sparse and "
        "ragged ids go through `embedding_lookup_sparse_impl`, and all lookups through "
        "`_embedding_lookup_and_transform`"),
    Row("op_def_registry", f"{_T}.framework:op_def_registry", FIT, "`get` describes operations: "
        "which inputs of a dataset's operation are datasets, and what functions use"),
    Row("gradients_util", f"{_T}.ops:gradients_util", GRADIENTS,
        "all functions named `gradients` call `_GradientsHelper`"),
    Row("keras_rnn", f"{_K}.backend.tensorflow.rnn", RECURRENT,
        "has `_is_gpu_available`, by which recurrent layers choose cuDNN"),
    Row("keras_summary", f"{_K}.utils.summary_utils", SUMMARIES,
        "has `count_params` and `weight_memory_size`, which count elements by shapes"),
    Row("keras_numpy", f"{_K}.backend.tensorflow:numpy", FIT, "`keras.layers.Embedding` reads its "
        "table by `take`", later=f"{_K}.backend.tensorflow.ops:numpy"),
    Row("CancellationManagerContext", f"{_T}.eager.cancellation:CancellationManagerContext", FIT,
        "makes the calls of executions cancellable, as `ClusterCoordinator.schedule` makes those "
        "of a `tf.function`", ("cancellation_manager",)),
    Row("cancellation_context", f"{_T}.eager.cancellation:context", FIT,
        "tells whether the calls of a thread are cancellable already"),
    Row("CancellationManager", f"{_T}.eager.cancellation:CancellationManager", FIT,
        "cancels the executions that wait for a lost ps"),
    Row("execute", f"{_T}.eager.execute:execute", FIT, "fetches outside of the cancellation "
        "manager: a fetch that fails would cancel all calls in flight",
        ("op_name", "num_outputs", "inputs", "attrs", "ctx")),
    Row("XSpace", "tensorflow.tsl.profiler.protobuf.xplane_pb2:XSpace", TRACES,
        "the records of a task's profiler, for a trace"),
    Row("ProfileOptions", "tensorflow.tsl.profiler.protobuf.profiler_options_pb2:ProfileOptions",
        TRACES, "the options of a task's profiler, for a trace"),
    Row("load_function_def_library",
        f"{_T}.saved_model.function_deserialization:load_function_def_library", RANDOM_FUNCTIONS,
        "functions that draw random numbers get the number of the step as an argument",
        ("library", "load_shared_name_suffix")),
    Row("eager_context", f"{_T}.eager.context:context", FIT,
        "connects to tasks, holds the configuration that they get, and runs operations"),
    Row("FunctionCallOptions", f"{_T}.eager.context:FunctionCallOptions", FIT,
        "sets the optimization of functions that tasks run", ("executor_type", "config_proto")),
    Row("default_graph_stack", f"{_T}.framework.ops:_default_graph_stack", FIT,
        "the graphs that a thread builds, restored after an interrupt"),
    Row("global_state", f"{_K}.backend.common.global_state:GLOBAL_STATE_TRACKER", FIT,
        "the thread that traces a replica enters the scopes of the one that traces the step"),
    Row("ResourceHandleProto", "tensorflow.core.framework.resource_handle_pb2:ResourceHandleProto",
        EARLIER_OBJECTS, "the name of a resource, and the device that it is on"),
    Row("CapturableResource", f"{_T}.trackable.resource:CapturableResource", FIT,
        "the class of lookup tables and other objects that can make their resource again"),
    Row("new_executor", f"{_T}.eager.executor:new_executor", FIT, "sends executions to a worker "
        "while it runs others, up to a limit", ("enable_async", "in_flight_nodes_limit")),
    Row("framework_ops", f"{_T}.framework:ops", MESSAGES,
        "patched: an error of an operation on a closed cluster's variable names that cause"),
    Row("Executor", f"{_T}.eager.executor:Executor", MESSAGES,
        "patched: deletes an executor whose task is lost without printing the error"),
    Row("Context", f"{_T}.eager.context:Context", FIT, "patched: at exit, functions are not "
        "removed from tasks that may have ended before; TensorFlow prints less when it looks for "
        "devices"),
    Row("anonymous_name", f"{_T}.eager.context:anonymous_name", FIT,
        "the name with which the runtime makes a new resource at each run of an operation"),
    Row("TracedFunction", f"{_T}.eager.polymorphic_function.polymorphic_function:Function", FIT,
        "patched: a `tf.function` that a step calls is traced as a part of the step"),
    Row("autograph_context", f"{_T}.autograph.core:ag_ctx", FUNCTIONS,
        "converts the control flow of such a function if its `autograph` says so"),
    Row("py_func_from_autograph",
        f"{_T}.eager.polymorphic_function.autograph_util:py_func_from_autograph", FUNCTIONS,
        "converts a Python function as `tf.function` does before it traces it", ("python_func",)),
    Row("get_read_only_resource_input_indices_graph",
        f"{_T}.framework.auto_control_deps_utils:get_read_only_resource_input_indices_graph", FIT,
        "tells which resources a step only reads", ("func_graph",)),
    Row("MultiDeviceSaver", f"{_T}.checkpoint.functional_saver:MultiDeviceSaver", CHECKPOINTS,
        "patched: writes and reads checkpoints; ours is a subclass",
        ("serialized_tensors",)),
    Row("CheckpointCallable", f"{_T}.checkpoint.tensor_callable:Callable", CHECKPOINTS, "stands "
        "for a value in a checkpoint, which is read when the checkpoint is written",
        ("tensor_callable", "dtype", "device")),
    Row("saved_model", f"{_T}.saved_model:save", EXPORTS, "patched: `save_and_return_nodes`, which "
        "`tf.saved_model.save` calls, and which traces the model's functions"),
    Row("input_signature_of", f"{_K}.export.export_utils:get_input_signature", EXPORTS,
        "the inputs of an export with `updatable=True`", ("model",)),
    Row("saving_api", f"{_K}.saving:saving_api", FILES,
        "patched: `save_model` and `load_model` are behind `model.save` and `keras.saving`"),
    Row("ask_to_overwrite", f"{_K}.utils.io_utils:ask_to_proceed_with_overwrite", FILES,
        "asks for `overwrite=False`; Keras would ask about the temporary file", ("filepath",)),
    Row("saving_lib", f"{_K}.saving:saving_lib", FILES, "patched: writes and reads weights, and "
        "chooses whether a file is made in memory"),
    Row("H5IOStore", f"{_K}.saving.saving_lib:H5IOStore", FILES,
        "patched: writes and reads its entries in chunks of rows"),
    Row("ShardedH5IOStore", f"{_K}.saving.saving_lib:ShardedH5IOStore", FILES,
        "the patch leaves out this subclass, which has one file open at a time"),
    Row("global_seed_generator", f"{_K}.random.seed_generator:global_seed_generator", BACKUPS,
        "Keras's global seed generator, which Keras makes at its first use"),
    Row("get_current_dispatch_context",
        f"{_T}.distribute.coordinator.coordinator_context:get_current_dispatch_context", FIT,
        "names the worker on which an execution runs"),
    Row("is_worker_failure", f"{_C}:_is_worker_failure", FIT,
        "tells which errors the coordinator takes for a lost worker", ("error",)),
    Row("CoordinatorWorker", f"{_C}:Worker", FIT,
        "the thread of a worker that joins", ("worker_index", "device_name", "cluster")),
    Row("FuncRegistry", f"{_T}.ops.script_ops:FuncRegistry", MESSAGES,
        "patched: `__call__` calls the Python functions of a dataset"),
    Row("multi_device_iterator_ops", f"{_T}.data.ops:multi_device_iterator_ops", CUSTOM_LOOPS,
        "patched: `_create_device_dataset` makes the dataset that an iterator reads on a device"),
    Row("ClosureInputError", f"{_C}:ClosureInputError", FIT,
        "an error that a lost worker can cause"),
    Row("ClosureAbortedError", f"{_C}:ClosureAbortedError", FIT,
        "an error that a lost worker can cause"),
    Row("Closure", f"{_C}:Closure", FIT, "the call of a scheduled function or of a session, until "
        "its result is there", ("function", "cancellation_mgr", "args", "kwargs")),
    Row("get_func_graphs", f"{_T}.ops.cond_v2:get_func_graphs", FIT, "the graphs of the branches "
        "of a condition, which show what a step makes of an old value", ("op",)),
    Row("CondBranchFuncGraph", f"{_T}.ops.control_flow_v2_func_graphs:CondBranchFuncGraph", FIT,
        "the graph of a condition, which belongs to the function around it"),
    Row("WhileCondFuncGraph", f"{_T}.ops.control_flow_v2_func_graphs:WhileCondFuncGraph", FIT,
        "the graph of a loop's condition, which belongs to the function around it"),
    Row("WhileBodyFuncGraph", f"{_T}.ops.control_flow_v2_func_graphs:WhileBodyFuncGraph", FIT,
        "the graph of a loop's body, which belongs to the function around it"),
)
PRIVATE_NAMES = {row.name: row for row in _NAMES}

# The methods that kerasps patches or overrides are here too: if one is renamed, nothing calls ours,
# without an error.
PRIVATE_ATTRIBUTES: tuple[Row, ...] = (
    Row("_clip_gradients", _OPTIMIZER, FIT,
        "clipping stays on the worker, or follows accumulation on the ps", ("grads",)),
    Row("_get_variable_index", _OPTIMIZER, FIT,
        "finds the accumulator of a variable", ("variable",)),
    Row("_use_weight_decay", _OPTIMIZER, FIT,
        "variables with and without weight decay are updated separately", ("variable",)),
    Row("_trainable_variables", _OPTIMIZER, FIT, "slots are lists parallel to it"),
    Row("_learning_rate", _OPTIMIZER, FIT, "the variable of it, unless there is a schedule"),
    Row("_accumulated_gradients", _OPTIMIZER, FIT, "the ps accumulate gradients"),
    Row("_model_variables_moving_average", _OPTIMIZER, FIT,
        "each ps updates the averages of its variables"),
    Row("_iterations", _OPTIMIZER, FIT,
        "counts every call of `apply`; `iterations` skips those that accumulate"),
    Row("_backend_update_step", _OPTIMIZER, FIT, "called on the ps, so that an optimizer's "
        "override of it runs", ("grads", "trainable_variables", "learning_rate")),
    Row("_apply_weight_decay", _OPTIMIZER, FIT, "weight decay runs on the ps", ("variables",)),
    Row("_distribution_strategy", _OPTIMIZER, FIT,
        "makes slots; set for an optimizer that was made outside of the scope"),
    Row("_distribute_strategy", _MODEL, FIT,
        "tells a model of ours from others; adopted ones get it"),
    Row("_compile_metrics", _MODEL, FIT,
        "built before the first trace, which would otherwise be repeated"),
    Row("_flatten_metrics_in_order", _MODEL, FIT,
        "makes the list that `train_on_batch` returns", ("logs",)),
    Row("_initial_epoch", _MODEL, FIT, "the epoch at which `BackupAndRestore` resumes"),
    Row("_autograph", _FUNCTION, FIT,
        "tells if a `tf.function` called by a step converts Python's control flow"),
    Row("_jit_compile", _FUNCTION, FIT, "tells if XLA compiles it"),
    Row("_thread_local", _GRAPH, FIT, "holds the strategies whose scopes a thread has entered"),
    Row("_distribution_strategy_stack", _GRAPH, FIT,
        "the strategies whose scopes the current thread has entered"),
    Row("_update_input", _OPERATION, FIT,
        "makes the shard of an array read a slice of it", ("index", "tensor")),
    Row("_set_device", _OPERATION, FIT, "places scalars of a step off the GPU", ("device",)),
    Row("_function_captures", _FUNC_GRAPH, FIT,
        "holds values that each call of the function reads"),
    Row("executor", _CONTEXT, FIT, "sends executions to a worker while it runs others"),
    Row("_config", _CONTEXT, FIT, "the configuration that tasks get when they are connected; no "
        "public function sets all of it"),
    Row("_thread_local_data", _CONTEXT, FIT, "the scopes of a thread, restored after an interrupt"),
    Row("context_switches", _CONTEXT, FIT,
        "the graphs and the eager mode of a thread, restored after an interrupt"),
    Row("call_function", _CONTEXT, FIT, "calls a function with flat arguments, in half the time",
        ("name", "tensor_inputs", "num_outputs")),
    Row("function_call_options", _CONTEXT, FIT,
        "sets the optimization of functions that tasks run"),
    Row("_context_handle", _CONTEXT, FIT, "tells if this process has used TensorFlow"),
    Row("_server_def", _CONTEXT, FIT, "reset when connecting fails"),
    Row("ensure_initialized", _CONTEXT, FIT, "TensorFlow's function to connect calls it"),
    Row("config", _CONTEXT, FIT, "the options that TensorFlow runs with"),
    Row("get_server_def", _CONTEXT, FIT, "the cluster that the context is connected to"),
    Row("set_server_def", _CONTEXT, FIT,
        "starts the server of this process", ("server_def", "keep_alive_secs")),
    Row("update_server_def", _CONTEXT, FIT, "adds the other tasks, and removes workers and adds "
        "them again", ("server_def", "keep_alive_secs")),
    Row("_flatten_layers", _LAYER, FIT,
        "finds the models in a model, and layers that are not built"),
    Row("_initialize", _VARIABLE, FIT, "overridden: makes the storage on a ps", ("value",)),
    Row("_initialize_with_initializer", _VARIABLE, FIT,
        "overridden: computes the value on the ps", ("initializer",)),
    Row("_maybe_autocast", _VARIABLE, FIT, "mixed precision casts the pulled value", ("value",)),
    Row("_value", _VARIABLE, FIT, "the storage"),
    Row("_dtype", _VARIABLE, FIT, "the given one, before the storage exists"),
    Row("_shared_name", _VARIABLE, CHECKPOINTS,
        "overridden: checkpoints name variables by it"),
    Row("_serialize_to_tensors", _VARIABLE, CHECKPOINTS,
        "overridden: TensorFlow writes checkpoints of variables by it"),
    Row("_restore_from_tensors", _VARIABLE, CHECKPOINTS,
        "overridden: TensorFlow reads checkpoints by it", ("restored_tensors",)),
    Row("_copy_trackable_to_cpu", _VARIABLE, CHECKPOINTS,
        "overridden: makes the copy for a checkpoint that is written later", ("object_map",)),
    Row("_extended", _STRATEGY, FIT, "replaced by ours, which places variables"),
    Row("_connect_to_cluster", _STRATEGY, FIT,
        "overridden: the devices of this process keep their names", ("coordinator_name",)),
    Row("_num_workers", _STRATEGY, FIT, "set by the overridden method"),
    Row("_num_ps", _STRATEGY, FIT, "set by the overridden method"),
    Row("_num_replicas_in_sync", _EXTENDED, FIT,
        "overridden: workers are not in sync; a loss is scaled by the devices of one worker"),
    Row("_use_merge_call", _EXTENDED, FIT, "overridden: the step applies the optimizer"),
    Row("_create_var_creator", _EXTENDED, FIT,
        "overridden: no caching or aggregation around a variable", ("next_creator",)),
    Row("_resource_creator_scope", _EXTENDED, FIT,
        "overridden: `lookup_tables` brings lookup tables to workers"),
    Row("_call_for_each_replica", _EXTENDED, FIT,
        "overridden: `strategy.run` in a traced function runs a step", ("fn", "args", "kwargs")),
    Row("_create_variable", _EXTENDED, FIT, "overridden: places variables", ("next_creator",)),
    Row("_create_variable_round_robin", _EXTENDED, FIT,
        "overridden: places variables and shards by their bytes", ("next_creator",)),
    Row("_update", _EXTENDED, FIT, "overridden: Keras applies weight decay through it",
        ("var", "fn", "args", "kwargs", "group")),
    Row("_devices", _MIRRORED_EXTENDED, CENTRAL, "the compute devices"),
    Row("_create_variable", _MIRRORED_EXTENDED, CENTRAL,
        "overridden: makes a variable on the parameter device", ("next_creator",)),
    Row("_use_merge_call", _MIRRORED_EXTENDED, CENTRAL,
        "overridden: the replicas meet for an update, which runs once"),
    Row("_call_for_each_replica", _MIRRORED_EXTENDED, CENTRAL,
        "overridden: raises an error for steps that XLA cannot compile", ("fn", "args", "kwargs")),
    Row("_collective_key_base", _MIRRORED_STRATEGY, CENTRAL,
        "its extended reads it from the strategy"),
    Row("_get_replica", _MIRRORED_VARIABLE, CENTRAL,
        "overridden: all replicas have the same value", ("replica_id",)),
    Row("_update_replica", _MIRRORED_VARIABLE, CENTRAL, "overridden: takes the first replica's "
        "value if there is no aggregation", ("update_fn", "value")),
    Row("_update_cross_replica", _MIRRORED_VARIABLE, CENTRAL,
        "does the update", ("update_fn", "value")),
    Row("_retrace_functions_for_each_device", _DEFAULT_DISTRIBUTION_EXTENDED, FIT,
        "a `tf.function` that is called in the scope reads it"),
    Row("_cluster", _CLUSTER_COORDINATOR, FIT,
        "schedules any function in a worker's thread, not only a `tf.function`"),
    Row("execute_on", _CLOSURE, FIT,
        "overridden: counts the call, so that its updates are applied once", ("worker",)),
    Row("build_output_remote_value", _CLOSURE, FIT, "makes the result that `schedule` returns"),
    Row("_concrete_function", _CLOSURE, CUSTOM_LOOPS,
        "the traced function, whose pushes are known"),
    Row("_function", _CLOSURE, CUSTOM_LOOPS,
        "set to a variant that skips updates that were applied"),
    Row("maybe_call_with_output_remote_value", _CLOSURE, CUSTOM_LOOPS,
        "sets the error of a closed cluster on a closure's result", ("method",)),
    Row("_queue", _QUEUE, FIT, "the pending closures when the cluster is closed"),
    Row("_tagged_queue", _QUEUE, FIT, "the pending closures of one worker"),
    Row("_cancellation_mgr", _QUEUE, FIT, "read by the code that makes a closure"),
    Row("stop", _QUEUE, FIT, "ends it when the cluster is closed"),
    Row("put", _QUEUE, FIT, "ours has the same signature", ("closure", "tag")),
    Row("put_back", _QUEUE, FIT, "ours has the same signature", ("closure",)),
    Row("get", _QUEUE, FIT, "ours has the same signature", ("timeout", "tag")),
    Row("mark_finished", _QUEUE, FIT, "ours has the same signature"),
    Row("mark_failed", _QUEUE, FIT, "ours has the same signature", ("e",)),
    Row("clear_tag_unlocked", _QUEUE, FIT, "ours has the same signature", ("tag",)),
    Row("wait", _QUEUE, FIT, "ours has the same signature", ("timeout",)),
    Row("done", _QUEUE, FIT, "ours has the same signature"),
    Row("_set_error", _REMOTE_VALUE_IMPL, FIT, "sets the error that `fetch` raises", ("error",)),
    Row("schedule", _CLUSTER, FIT, "replaced by ours, which makes calls that are counted",
        ("function", "args", "kwargs")),
    Row("closure_queue", _CLUSTER, FIT, "replaced by ours when the cluster is closed"),
    Row("failure_handler", _CLUSTER, FIT, "replaced by ours"),
    Row("workers", _CLUSTER, FIT, "each has the failure handler too; a new worker is added"),
    Row("_num_workers", _CLUSTER, FIT, "incremented for a new worker"),
    Row("_record_and_ignore_transient_ps_failure", _CLUSTER, FIT,
        "called as TensorFlow's handler does", ("e",)),
    Row("_record_and_ignore_transient_timeouts", _CLUSTER, FIT,
        "called as TensorFlow's handler does", ("e",)),
    Row("stop", _HANDLER, FIT, "ends the one that ours replaces"),
    Row("wait_on_failure", _HANDLER, FIT, "ours has the same signature",
        ("on_failure_fn", "on_transient_failure_fn", "on_recovery_fn", "worker_device_name")),
    Row("_captured_inputs", _CONCRETE_FUNCTION, FIT, "the handles that it was traced with"),
    Row("set_external_captures", _CONCRETE_FUNCTION, FIT, "replaces them", ("captures",)),
    Row("_inputs", _DATASET, FIT, "the datasets that it is made from"),
    Row("_functions", _DATASET, FIT, "the functions that it calls"),
    Row("_flat_structure", _DATASET, FIT, "the types of its iterator"),
    Row("_variant_tensor_attr", _DATASET, FIT, "the dataset's tensor, replaced by a new one"),
    Row("_resource_handle", _RESOURCE, FIT, "the handle"),
    Row("_resource_handle_value", _RESOURCE, FIT, "the handle, or None before it exists"),
    Row("_resource_device", _RESOURCE, FIT, "the device on which it makes the resource"),
    Row("_create_resource", _RESOURCE, FIT, "makes the resource, under its name"),
    Row("_initialize", _RESOURCE, FIT, "fills it"),
    Row("_resource", _RESOURCE_SUMMARY_WRITER, FIT, "the handle"),
    Row("_closed", _RESOURCE_SUMMARY_WRITER, FIT, "tells if it is closed"),
    Row("_h5_entry_group", _H5IOSTORE, FILES, "holds the entries of the current layer"),
    Row("_current_epoch", _BACKUP, BACKUPS, "the current epoch"),
    Row("_last_batch_seen", _BACKUP, BACKUPS, "the current batch"),
    Row("_weights_path", _BACKUP, BACKUPS, "the file with the weights"),
    Row("_training_metadata_path", _BACKUP, BACKUPS, "the file with the epoch and the batch"),
    Row("_ema_weights_in_model", _SWAP_EMAWEIGHTS, BACKUPS,
        "tells if a backup between epochs holds the averages"),
    Row("save", _MULTI_DEVICE_SAVER, CHECKPOINTS,
        "overridden: uses an absolute path, and a device that can access it",
        ("file_prefix", "options")),
    Row("restore", _MULTI_DEVICE_SAVER, CHECKPOINTS,
        "overridden: uses an absolute path, and a device that can access it",
        ("file_prefix", "options")),
    Row("_handle", _TF_VARIABLE, FIT, "replaced if this process had another server before"),
    Row("_unique_id", _TF_VARIABLE, FIT, "Keras finds slots by it"),
    Row("_read_variable_op", _TF_VARIABLE, FIT,
        "overridden: every read calls it; its error names a lost ps"),
)

PRIVATE_TEXTS: tuple[PrivateText, ...] = (
    PrivateText(_C, "GRPC error information from remote target /job:ps",
                "an error that came from a ps"),
    PrivateText(_C, "unknown device", "a task that was restarted"),
    PrivateText(_C, "Unable to find the relevant tensor remote_handle",
                "a task that was restarted"),
    PrivateText(_C, "/job:worker", "an error that TensorFlow takes for a lost worker"),
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
    PrivateText(_OPTIMIZERS, 'name="iteration"', "the variable that counts an optimizer's steps"),
    PrivateText(_OPTIMIZERS, 'name="learning_rate"', "the variable of the learning rate"),
    PrivateText("keras.src.metrics.metric", 'synchronization="on_read"',
                "the state of a metric, which is summed over workers"),
)
# fmt: on
