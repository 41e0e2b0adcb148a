"""Lists the private names of Keras and TensorFlow that kerasps imports, and the reason for each.

`kerasps._compat` imports this list. It holds only text, so that a task's server starts fast.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrivateName:
    """A private name: its module, its use in kerasps, and the parameters that kerasps passes.

    Args:
        module: the module that holds it.
        attribute: its name there.
        why: what kerasps needs it for.
        parameters: the names of the parameters that kerasps passes.
        later_module: the module that holds it in later versions, if it has moved.
    """

    module: str
    attribute: str
    why: str
    parameters: tuple[str, ...] = ()
    later_module: str = ""


PRIVATE_NAMES: dict[str, PrivateName] = {
    "BaseOptimizer": PrivateName(
        "keras.src.optimizers.base_optimizer",
        "BaseOptimizer",
        "`_backend_apply_gradients` is where gradients leave the worker",
    ),
    "TFOptimizer": PrivateName(
        "keras.src.backend.tensorflow.optimizer",
        "TFOptimizer",
        "its update loop calls `_backend_update_step` and `_var_key`",
    ),
    "train_validation_split": PrivateName(
        "keras.src.trainers.data_adapters.array_slicing",
        "train_validation_split",
        "`validation_split` of arrays",
        ("arrays", "validation_split"),
    ),
    "data_adapters": PrivateName(
        "keras.src.trainers",
        "data_adapters",
        "reads generators, `PyDataset`s and loaders as Keras does",
    ),
    "in_symbolic_scope": PrivateName(
        "keras.src.backend.common.symbolic_scope",
        "in_symbolic_scope",
        "detects the call that builds a model in its first step: it computes only shapes, and does "
        "not show which variables the step reads",
    ),
    "get_stateless_scope": PrivateName(
        "keras.src.backend.common.stateless_scope",
        "get_stateless_scope",
        "a value that `keras.StatelessScope` holds replaces the value of a step",
    ),
    "record_variable_access": PrivateName(
        "tensorflow.python.pywrap_tfe",
        "TFE_Py_TapeVariableAccessed",
        "tells a GradientTape that a variable was read when a step gets its pulled value",
    ),
    "record_variable_access_to_watchers": PrivateName(
        "tensorflow.python.pywrap_tfe",
        "TFE_Py_VariableWatcherVariableAccessed",
        "tells a `tf.custom_gradient` that its function has read a variable",
    ),
    "record_operation": PrivateName(
        "tensorflow.python.eager.record",
        "record_operation",
        "tells a GradientTape that the rows of a lookup depend on the table",
        ("op_type", "output_tensors", "input_tensors", "backward_function"),
    ),
    "containing_xla_context": PrivateName(
        "tensorflow.python.ops.control_flow_util",
        "GetContainingXLAContext",
        "tells if XLA will compile the function that is being traced; XLA takes no variables of "
        "other machines",
        ("ctxt",),
    ),
    "in_xla_context": PrivateName(
        "tensorflow.python.ops.control_flow_util",
        "GraphOrParentsInXlaContext",
        "tells if replicas run in a function that XLA compiles",
        ("graph",),
    ),
    "ParameterServerStrategyV2Extended": PrivateName(
        "tensorflow.python.distribute.parameter_server_strategy_v2",
        "ParameterServerStrategyV2Extended",
        "chooses the ps of a variable; the public strategy offers no other way",
        ("container_strategy", "cluster_resolver", "variable_partitioner"),
    ),
    "MirroredExtended": PrivateName(
        "tensorflow.python.distribute.mirrored_strategy",
        "MirroredExtended",
        "runs replicas; `CentralStorageStrategy` differs in the device of variables",
        ("container_strategy", "devices", "cross_device_ops"),
    ),
    "MirroredVariable": PrivateName(
        "tensorflow.python.distribute.values",
        "MirroredVariable",
        "ours has one value for all replicas",
    ),
    "SyncOnReadVariable": PrivateName(
        "tensorflow.python.distribute.values",
        "SyncOnReadVariable",
        "ours converts to numbers and arrays",
    ),
    "create_mirrored_variable": PrivateName(
        "tensorflow.python.distribute.distribute_utils",
        "create_mirrored_variable",
        "makes the variable around its values, as the mirrored strategy does",
        ("strategy", "real_mirrored_creator", "class_mapping", "policy_mapping"),
    ),
    "BaseResourceVariable": PrivateName(
        "tensorflow.python.ops.resource_variable_ops",
        "BaseResourceVariable",
        "the class of all `tf.Variable`s, including those that a `tf.function` has made",
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
        "tensorflow.python.ops.handle_data_util",
        "set_handle_data",
        "as above",
        ("target_t", "handle_data"),
    ),
    "InternalTensor": PrivateName(
        "tensorflow.python.types.core",
        "Tensor",
        "`tf.is_tensor` checks for this class: Keras then does not copy the shards of a variable "
        "into an array",
    ),
    "NativeObject": PrivateName(
        "tensorflow.python.types.internal",
        "NativeObject",
        "`tf.nn.embedding_lookup` passes such objects unchanged to the lookup, and reads others "
        "whole",
    ),
    "embedding_ops": PrivateName(
        "tensorflow.python.ops",
        "embedding_ops",
        "lookups of sparse and ragged ids go through `embedding_lookup_sparse_impl`, and all "
        "lookups through `_embedding_lookup_and_transform`",
    ),
    "op_def_registry": PrivateName(
        "tensorflow.python.framework",
        "op_def_registry",
        "`get` describes operations: which inputs of a dataset's operation are datasets, and what "
        "functions use",
    ),
    "gradients_util": PrivateName(
        "tensorflow.python.ops",
        "gradients_util",
        "all functions named `gradients` call `_GradientsHelper`",
    ),
    "cudnn_ok": PrivateName(
        "keras.src.backend.tensorflow.rnn",
        "cudnn_ok",
        "its module has `_is_gpu_available`, by which recurrent layers choose cuDNN",
    ),
    "keras_numpy": PrivateName(
        "keras.src.backend.tensorflow",
        "numpy",
        "`keras.layers.Embedding` reads its table by `take`",
        later_module="keras.src.backend.tensorflow.ops",
    ),
    "get_default_replica_mode": PrivateName(
        "tensorflow.python.distribute.distribute_lib",
        "_get_default_replica_mode",
        "`LossScaleOptimizer.apply` in the scope, but outside a step, runs as if no strategy were "
        "current",
    ),
    "push_per_thread_mode": PrivateName(
        "tensorflow.python.distribute.distribute_lib",
        "_push_per_thread_mode",
        "as above",
        ("context",),
    ),
    "pop_per_thread_mode": PrivateName(
        "tensorflow.python.distribute.distribute_lib", "_pop_per_thread_mode", "as above"
    ),
    "CancellationManagerContext": PrivateName(
        "tensorflow.python.eager.cancellation",
        "CancellationManagerContext",
        "makes the calls of executions cancellable, as `ClusterCoordinator.schedule` makes those "
        "of a `tf.function`",
        ("cancellation_manager",),
    ),
    "CancellationManager": PrivateName(
        "tensorflow.python.eager.cancellation",
        "CancellationManager",
        "cancels the executions that wait for a lost ps",
    ),
    "eager_mode": PrivateName(
        "tensorflow.python.eager.context",
        "eager_mode",
        "a variable that is garbage collected while TensorFlow builds a graph is destroyed at "
        "once, and not by the graph",
    ),
    "execute": PrivateName(
        "tensorflow.python.eager.execute",
        "execute",
        "fetches outside of the cancellation manager: a fetch that fails would cancel all calls "
        "in flight",
        ("op_name", "num_outputs", "inputs", "attrs", "ctx"),
    ),
    "XSpace": PrivateName(
        "tensorflow.tsl.profiler.protobuf.xplane_pb2",
        "XSpace",
        "the records of a task's profiler, for a trace",
    ),
    "ProfileOptions": PrivateName(
        "tensorflow.tsl.profiler.protobuf.profiler_options_pb2",
        "ProfileOptions",
        "the options of a task's profiler, for a trace",
    ),
    "load_function_def_library": PrivateName(
        "tensorflow.python.saved_model.function_deserialization",
        "load_function_def_library",
        "functions that draw random numbers get the number of the step as an argument",
        ("library", "load_shared_name_suffix"),
    ),
    "eager_context": PrivateName(
        "tensorflow.python.eager.context",
        "context",
        "connects to tasks, holds the configuration that they get, and runs operations",
    ),
    "FunctionCallOptions": PrivateName(
        "tensorflow.python.eager.context",
        "FunctionCallOptions",
        "sets the optimization of functions that tasks run",
        ("executor_type", "config_proto"),
    ),
    "default_graph_stack": PrivateName(
        "tensorflow.python.framework.ops",
        "_default_graph_stack",
        "the graphs that a thread builds, restored after an interrupt",
    ),
    "get_global_attribute": PrivateName(
        "keras.src.backend.common.global_state",
        "get_global_attribute",
        "the scopes of Keras that a thread is in",
        ("name", "default", "set_to_default"),
    ),
    "set_global_attribute": PrivateName(
        "keras.src.backend.common.global_state",
        "set_global_attribute",
        "restores them after an interrupt",
        ("name", "value"),
    ),
    "global_state": PrivateName(
        "keras.src.backend.common.global_state",
        "GLOBAL_STATE_TRACKER",
        "the thread that traces a replica enters the scopes of the one that traces the step",
    ),
    "EagerTensor": PrivateName(
        "tensorflow.python.framework.ops",
        "EagerTensor",
        "finds the handles of all living resources",
    ),
    "TensorProto": PrivateName(
        "tensorflow.core.framework.tensor_pb2",
        "TensorProto",
        "the content of a handle: the name and the type of a resource",
    ),
    "ResourceHandleProto": PrivateName(
        "tensorflow.core.framework.resource_handle_pb2", "ResourceHandleProto", "as above"
    ),
    "ConcreteFunction": PrivateName(
        "tensorflow.python.eager.polymorphic_function.concrete_function",
        "ConcreteFunction",
        "a compiled function from before the connection gets the new handles of variables",
    ),
    "CapturableResource": PrivateName(
        "tensorflow.python.trackable.resource",
        "CapturableResource",
        "the class of lookup tables and other objects that can make their resource again",
    ),
    "InitializableLookupTableBase": PrivateName(
        "tensorflow.python.ops.lookup_ops",
        "InitializableLookupTableBase",
        "a table that is filled once, and not by `insert`",
    ),
    "ResourceSummaryWriter": PrivateName(
        "tensorflow.python.ops.summary_ops_v2",
        "_ResourceSummaryWriter",
        "kerasps closes a writer made before the connection, so that its file is complete",
    ),
    "new_executor": PrivateName(
        "tensorflow.python.eager.executor",
        "new_executor",
        "sends executions to a worker while it runs others, up to a limit",
        ("enable_async", "in_flight_nodes_limit"),
    ),
    "framework_ops": PrivateName(
        "tensorflow.python.framework",
        "ops",
        "patched: an error of an operation on a closed cluster's variable names that cause",
    ),
    "Executor": PrivateName(
        "tensorflow.python.eager.executor",
        "Executor",
        "patched: deletes an executor whose task is lost without printing the error",
    ),
    "Context": PrivateName(
        "tensorflow.python.eager.context",
        "Context",
        "patched: at exit, functions are not removed from tasks that may have ended before; "
        "TensorFlow prints less when it looks for devices",
    ),
    "anonymous_name": PrivateName(
        "tensorflow.python.eager.context",
        "anonymous_name",
        "the name with which the runtime makes a new resource at each run of an operation",
    ),
    "TracedFunction": PrivateName(
        "tensorflow.python.eager.polymorphic_function.polymorphic_function",
        "Function",
        "patched: a `tf.function` that a step calls is traced as a part of the step",
    ),
    "autograph_context": PrivateName(
        "tensorflow.python.autograph.core",
        "ag_ctx",
        "converts the control flow of such a function if its `autograph` says so",
    ),
    "py_func_from_autograph": PrivateName(
        "tensorflow.python.eager.polymorphic_function.autograph_util",
        "py_func_from_autograph",
        "converts a Python function as `tf.function` does before it traces it",
        ("python_func",),
    ),
    "get_read_only_resource_input_indices_graph": PrivateName(
        "tensorflow.python.framework.auto_control_deps_utils",
        "get_read_only_resource_input_indices_graph",
        "tells which resources a step only reads",
        ("func_graph",),
    ),
    "MultiDeviceSaver": PrivateName(
        "tensorflow.python.checkpoint.functional_saver",
        "MultiDeviceSaver",
        "patched: writes and reads checkpoints; our saver handles variables in shards",
        ("serialized_tensors",),
    ),
    "CheckpointCallable": PrivateName(
        "tensorflow.python.checkpoint.tensor_callable",
        "Callable",
        "stands for a value in a checkpoint, which is read when the checkpoint is written",
        ("tensor_callable", "dtype", "device"),
    ),
    "saved_model": PrivateName(
        "tensorflow.python.saved_model",
        "save",
        "patched: `save_and_return_nodes`, which `tf.saved_model.save` calls, and which traces the "
        "model's functions",
    ),
    "saving_api": PrivateName(
        "keras.src.saving",
        "saving_api",
        "`load_model` reports a damaged file as missing",
    ),
    "saving_lib": PrivateName(
        "keras.src.saving",
        "saving_lib",
        "its functions behind `model.save`, `keras.saving.load_model` and others are patched",
    ),
    "legacy_h5_format": PrivateName(
        "keras.src.legacy.saving",
        "legacy_h5_format",
        "patched: `save_model_to_hdf5` is behind `model.save` to an `.h5` file",
    ),
    "H5IOStore": PrivateName(
        "keras.src.saving.saving_lib",
        "H5IOStore",
        "patched: writes and reads its entries in chunks of rows",
    ),
    "ShardedH5IOStore": PrivateName(
        "keras.src.saving.saving_lib",
        "ShardedH5IOStore",
        "the patch leaves out this subclass, which has one file open at a time",
    ),
    "global_seed_generator": PrivateName(
        "keras.src.random.seed_generator",
        "global_seed_generator",
        "Keras's global seed generator, which Keras makes at its first use",
    ),
    "get_current_dispatch_context": PrivateName(
        "tensorflow.python.distribute.coordinator.coordinator_context",
        "get_current_dispatch_context",
        "names the worker on which an execution runs",
    ),
    "is_worker_failure": PrivateName(
        "tensorflow.python.distribute.coordinator.cluster_coordinator",
        "_is_worker_failure",
        "tells which errors the coordinator takes for a lost worker",
        ("error",),
    ),
    "CoordinatorWorker": PrivateName(
        "tensorflow.python.distribute.coordinator.cluster_coordinator",
        "Worker",
        "the thread of a worker that joins",
        ("worker_index", "device_name", "cluster"),
    ),
    "FuncRegistry": PrivateName(
        "tensorflow.python.ops.script_ops",
        "FuncRegistry",
        "patched: `__call__` calls the Python functions of a dataset",
    ),
    "multi_device_iterator_ops": PrivateName(
        "tensorflow.python.data.ops",
        "multi_device_iterator_ops",
        "patched: `_create_device_dataset` makes the dataset that an iterator reads on a device",
    ),
    "ClosureInputError": PrivateName(
        "tensorflow.python.distribute.coordinator.cluster_coordinator",
        "ClosureInputError",
        "an error that a lost worker can cause",
    ),
    "ClosureAbortedError": PrivateName(
        "tensorflow.python.distribute.coordinator.cluster_coordinator",
        "ClosureAbortedError",
        "an error that a lost worker can cause",
    ),
    "Closure": PrivateName(
        "tensorflow.python.distribute.coordinator.cluster_coordinator",
        "Closure",
        "a scheduled function, from `schedule` until its result is there",
    ),
    "ShardedVariable": PrivateName(
        "tensorflow.python.distribute.sharded_variable",
        "ShardedVariable",
        "a bare `tf.Variable` in shards, which a tape and an optimizer use as separate variables",
    ),
    "FuncGraph": PrivateName(
        "tensorflow.python.framework.func_graph",
        "FuncGraph",
        "tells if a function that is being traced is part of another one",
    ),
    "get_func_graphs": PrivateName(
        "tensorflow.python.ops.cond_v2",
        "get_func_graphs",
        "the graphs of the branches of a condition, which show what a step makes of an old value",
        ("op",),
    ),
    "CondBranchFuncGraph": PrivateName(
        "tensorflow.python.ops.control_flow_v2_func_graphs",
        "CondBranchFuncGraph",
        "the graph of a condition, which belongs to the function around it",
    ),
    "WhileCondFuncGraph": PrivateName(
        "tensorflow.python.ops.control_flow_v2_func_graphs",
        "WhileCondFuncGraph",
        "the graph of a loop's condition, which belongs to the function around it",
    ),
    "WhileBodyFuncGraph": PrivateName(
        "tensorflow.python.ops.control_flow_v2_func_graphs",
        "WhileBodyFuncGraph",
        "the graph of a loop's body, which belongs to the function around it",
    ),
}
