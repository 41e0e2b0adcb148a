"""What kerasps hooks in Keras, all of it, once a strategy exists. Models outside our scope take Keras's own way throughout."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import tensorflow as tf

from kerasps import _compat, eager, variables
from kerasps.adoption import adopt_model, adopt_optimizer, adopt_variable, connect, strategy_of
from kerasps.compute import Compute
from kerasps.failures import connected_to, translated_errors
from kerasps.forks import take_note_of_forks
from kerasps.sharding import ShardedStorage
from kerasps.strategy import ParameterServerStrategy
from kerasps.updating import UpdatePhase
from kerasps.variables import ParameterServerVariable

_Result = TypeVar("_Result")

_installed = False


def install(strategy: ParameterServerStrategy) -> None:
    """Hooks Keras for the one strategy of this process; the second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    connect(strategy)
    connected_to(strategy)
    take_note_of_forks()
    _hook_variables(strategy)
    _hook_building(strategy)
    _hook_optimizers(strategy)
    _hook_functions()
    _hook_take()
    _hook_tapes()
    _hook_trainer()
    _hook_saving()
    _hook_checkpoints(strategy)
    _hook_default_graph()
    _hook_executors()


def _hook_variables(strategy: ParameterServerStrategy) -> None:
    keras.Variable.__new__ = staticmethod(variables.make_parameter_server_variable)

    def adopts(variable: Any) -> bool:
        """Adopts a variable that a step touches and that was made elsewhere; returns whether it was one."""
        return isinstance(variables.phase(), Compute) and variable._value is not None and adopt_variable(strategy, variable)

    value = keras.Variable.value
    keras.Variable.value = property(lambda self: self.value if adopts(self) else value.fget(self), doc=value.__doc__)

    @_wraps(keras.Variable, "assign")
    def assign(original: Any, self: Any, value: Any) -> Any:
        return self.assign(value) if adopts(self) else original(self, value)


def _hook_building(strategy: ParameterServerStrategy) -> None:
    """A model of ours is compiled, and built, in its strategy's scope, wherever it is called."""

    def scope() -> contextlib.AbstractContextManager[Any]:
        is_current = tf.distribute.get_strategy() is strategy
        return contextlib.nullcontext() if is_current else strategy.scope()

    @_wraps(_compat.BaseTrainer, "compile")
    def compile_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if strategy_of(self) is None:
            original(self, *args, **kwargs)
            return
        with scope():
            original(self, *args, **kwargs)
        adopt_model(strategy, self)

    @_wraps(keras.layers.Layer, "_open_name_scope")
    def open_name_scope(original: Any, self: Any) -> Any:
        opened = original(self)
        is_ours = getattr(self, "_distribute_strategy", None) is strategy and tf.distribute.get_strategy() is not strategy
        if not is_ours or all(layer.built for layer in self._flatten_layers()):
            return opened
        return _both(strategy.scope(), opened)

    for name in ("add_variable", "add_variable_from_reference"):

        @_wraps(_compat.TFOptimizer, name)
        def add_variable(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            is_ours = getattr(self, "_distribution_strategy", None) is strategy
            with scope() if is_ours and variables.phase() is None else contextlib.nullcontext():
                return original(self, *args, **kwargs)


@contextlib.contextmanager
def _both(outer: Any, inner: Any) -> Iterator[Any]:
    with outer, inner as entered:
        yield entered


def _hook_optimizers(strategy: ParameterServerStrategy) -> None:
    base, backend = _compat.BaseOptimizer, _compat.TFOptimizer

    @_wraps(base, "_backend_apply_gradients")
    def apply_gradients(original: Any, self: Any, grads: Any, trainable_variables: Any) -> None:
        phase = variables.phase()
        if isinstance(phase, Compute):
            phase.apply_gradients(self, grads, trainable_variables)
        else:
            original(self, grads, trainable_variables)

    @_wraps(backend, "_backend_update_step")
    def update_step(original: Any, self: Any, grads: Any, trainable_variables: Any, learning_rate: Any) -> None:
        phase = variables.phase()
        if isinstance(phase, Compute):
            phase.record_update_step(grads, trainable_variables, learning_rate)
        else:
            original(self, grads, trainable_variables, learning_rate)

    @_wraps(base, "_get_current_learning_rate")
    def learning_rate(original: Any, self: Any) -> Any:
        phase = variables.phase()
        return phase.learning_rate if isinstance(phase, UpdatePhase) and phase.optimizer is self else original(self)

    @_wraps(base, "apply")
    def apply(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> None:
        trainable_variables = None if trainable_variables is None else list(trainable_variables)
        phase = variables.phase()
        if isinstance(phase, Compute):
            adopt_optimizer(strategy, self)
            phase.meet(self)
            # Of a table, a step has few rows: summed for each of them, a gradient is small, and no longer a special case.
            grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        if isinstance(phase, Compute) and not self.built and trainable_variables is not None:
            with tf.init_scope(), variables.entering(None):
                self.build(trainable_variables)
        original(self, grads, trainable_variables)

    @_wraps(keras.optimizers.LossScaleOptimizer, "apply")
    def apply_scaled(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if tf.distribute.get_strategy() is strategy and tf.distribute.in_cross_replica_context():
            # In the scope, but not in a step. Keras refuses this under any strategy; here there are no replicas to agree.
            with eager.without_current(strategy):
                original(self, *args, **kwargs)
        else:
            original(self, *args, **kwargs)

    @_wraps(backend, "add_variable_from_reference")
    def add_variable_from_reference(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # A slot lies beside the storage, not beside the value of a step, or of a function that XLA compiles.
        with tf.init_scope(), variables.entering(None):
            return original(self, *args, **kwargs)

    @_wraps(backend, "_var_key")
    def var_key(original: Any, self: Any, variable: Any) -> Any:
        return variable.storage._unique_id if isinstance(variable, ParameterServerVariable) else original(self, variable)

    @_wraps(backend, "_apply_weight_decay")
    def apply_weight_decay(original: Any, self: Any, trainable_variables: Any) -> None:
        if isinstance(variables.phase(), UpdatePhase):  # TensorFlow's takes storages, which in a push may be rows of one
            base._apply_weight_decay(self, trainable_variables)
        else:
            original(self, trainable_variables)

    for name in ("assign", "assign_add", "assign_sub"):

        @_wraps(backend, name)
        def assign(original: Any, self: Any, variable: Any, value: Any, _name: str = name) -> None:
            if variables.phase() is not None and isinstance(variable, ParameterServerVariable):
                getattr(variable, _name)(value)
            else:
                original(self, variable, value)


def _hook_functions() -> None:
    @_wraps(_compat.TracedFunction, "__call__")
    def call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        # Keras has its grouped convolutions compiled by XLA, and a CPU can do them in no other way.
        is_compiled = self._jit_compile and self.python_function.__module__.startswith("keras.")
        if is_compiled or not isinstance(variables.phase(), Compute):
            return original(self, *args, **kwargs)
        # A part of the step: as a function of its own it would keep the tensors of this trace for the next one, and a
        # GradientTape around it would not see which variables it reads.
        function = self.python_function
        if not self._autograph:
            return function(*args, **kwargs)
        status = _compat.autograph_context.Status.ENABLED  # the trace of the step has it disabled
        with _compat.autograph_context.ControlStatusCtx(status):
            return _compat.py_func_from_autograph(function)(*args, **kwargs)


def _hook_take() -> None:
    @_wraps(_compat.keras_numpy, "take")
    def take(original: Any, x: Any, indices: Any, axis: int | None = None) -> Any:
        # Keras's reads all of `x`; this is how `keras.layers.Embedding` looks rows up.
        if axis != 0 or not isinstance(x, ParameterServerVariable):
            return original(x, indices, axis)
        num_rows = x.shape[0]

        def from_start(ids: tf.Tensor) -> tf.Tensor:
            if ids.dtype.is_unsigned:
                return ids
            ids = tf.cast(ids, tf.int32) if ids.dtype.size < 4 else ids  # which may not hold the number of rows
            # What is out of range stays as it was given, for the error that names it.
            return tf.where((ids < 0) & (ids >= -num_rows), ids + num_rows, ids)

        if isinstance(indices, tf.RaggedTensor):
            return indices.with_flat_values(x.take(from_start(indices.flat_values)))
        if isinstance(indices, tf.SparseTensor):
            indices = tf.sparse.to_dense(indices)  # Keras too looks up id 0 where there is none
        return x.take(from_start(tf.convert_to_tensor(indices)))


def _hook_tapes() -> None:
    # To a tape, a variable in shards is as many variables: it has no handle that stands for all of them.
    @_wraps(tf.GradientTape, "gradient")
    def gradient(original: Any, self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        flat = tf.nest.flatten(sources)
        storages = [_storage_in_shards(source) for source in flat]
        if all(storage is None for storage in storages):
            return original(self, target, sources, *args, **kwargs)
        expanded = [source if own is None else own.shards for own, source in zip(storages, flat, strict=True)]
        gradients = original(self, target, expanded, *args, **kwargs)
        joined = [g if own is None else own.joined_gradient(g) for own, g in zip(storages, gradients, strict=True)]
        return tf.nest.pack_sequence_as(sources, joined)

    @_wraps(tf.GradientTape, "watch")
    def watch(original: Any, self: Any, tensor: Any) -> None:
        original(self, [t.shards if isinstance(t, ShardedStorage) else t for t in tf.nest.flatten(tensor)])


def _storage_in_shards(source: Any) -> ShardedStorage | None:
    """The storage that a tape sees as several variables; None for other sources, and in a step, which has tensors."""
    if isinstance(source, ParameterServerVariable) and variables.phase() is None and source.compiled_graph() is None:
        source = source.storage
    return source if isinstance(source, ShardedStorage) else None


def _hook_trainer() -> None:
    from kerasps import trainer

    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        ours = getattr(trainer, name)

        @_wraps(_compat.TensorFlowTrainer, name)
        def method(original: Any, self: Any, *args: Any, _ours: Any = ours, **kwargs: Any) -> Any:
            strategy = strategy_of(self)
            if strategy is None:
                return original(self, *args, **kwargs)
            with translated_errors(strategy):
                return (eager.run if eager.runs_eagerly(self) else _ours)(original, self, *args, **kwargs)

    @_wraps(_compat.TensorFlowTrainer, "_maybe_symbolic_build")
    def symbolic_build(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if not eager.is_running(self):  # which builds model and optimizer in its first step, as without a strategy
            original(self, *args, **kwargs)

    distribute_strategy = _compat.TensorFlowTrainer.distribute_strategy.fget

    def strategy_of_loop(self: Any) -> Any:
        strategy = distribute_strategy(self)
        return eager.StrategyOfLoop(strategy) if eager.is_running(self) else strategy

    _compat.TensorFlowTrainer.distribute_strategy = property(strategy_of_loop)


def _hook_saving() -> None:
    from kerasps import export, saving

    library, store, backup = _compat.saving_lib, _compat.H5IOStore, keras.callbacks.BackupAndRestore
    _wraps(library, "save_model")(saving.save_model)
    _wraps(library, "save_weights_only")(saving.save_weights)
    _wraps(library, "load_model")(saving.load_model)
    _wraps(library, "load_weights_only")(saving.load_weights)
    _wraps(library, "is_memory_sufficient")(saving.is_memory_sufficient)
    _wraps(_compat.legacy_h5_format, "save_model_to_hdf5")(saving.save_model)
    _wraps(store, "__setitem__")(saving.set_entry)
    _wraps(store, "__getitem__")(saving.get_entry)
    _wraps(_compat.BaseOptimizer, "save_own_variables")(saving.save_optimizer)
    _wraps(backup, "_save_model")(saving.back_up)
    _wraps(backup, "_load_model")(saving.restore_backup)
    archive = type(keras.export.ExportArchive())  # which is not always the class that is called
    for owner, name in ((archive, "add_endpoint"), (archive, "write_out"), (_compat.saved_model, "save_and_return_nodes")):

        @_wraps(owner, name)
        def exported(original: Any, *args: Any, **kwargs: Any) -> Any:
            with export.exporting():
                return original(*args, **kwargs)


def _hook_default_graph() -> None:
    # Until somebody imports it, `tf.compat.v1` is another object.
    @_wraps(importlib.import_module("tensorflow.compat.v1"), "reset_default_graph")
    def reset_default_graph(original: Any) -> None:
        # By way of `keras.utils.clear_session`. Of each thread, the default graph holds the strategies whose scopes it is in:
        # what is built after a new one would be trained in this process, and the scopes could not be left.
        before = tf.compat.v1.get_default_graph()
        original()
        tf.compat.v1.get_default_graph()._thread_local = before._thread_local


def _hook_checkpoints(strategy: ParameterServerStrategy) -> None:
    from kerasps import checkpoints

    saver = _compat.MultiDeviceSaver
    _wraps(saver, "__init__")(checkpoints.make_saver)
    for name in ("save", "restore"):
        ours = getattr(checkpoints, name)

        @_wraps(saver, name)
        def method(original: Any, *args: Any, _ours: Any = ours, **kwargs: Any) -> Any:
            with translated_errors(strategy):
                return _ours(original, *args, **kwargs)


def _hook_executors() -> None:
    # TensorFlow waits for an executor before it deletes it, and prints the error that this ends in where a task is gone, behind
    # the error that told of it, and keeps the executor.
    @_wraps(_compat.Executor, "__del__")
    def delete(original: Any, self: Any, _op_error: Any = tf.errors.OpError) -> None:
        for _ in range(3):
            try:
                original(self)
                return
            except _op_error:
                self.clear_error()


def _wraps(owner: Any, name: str) -> Callable[[Callable[..., _Result]], Callable[..., _Result]]:
    """Replaces `owner.name` by the decorated function, which gets the original as its first argument."""

    def replace(function: Callable[..., _Result]) -> Callable[..., _Result]:
        original = getattr(owner, name)

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> _Result:
            return function(original, *args, **kwargs)

        setattr(owner, name, hooked)
        return hooked

    return replace
