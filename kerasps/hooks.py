"""What kerasps hooks in Keras, all of it, once a strategy exists. Models outside our scope take Keras's own way throughout."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import tensorflow as tf

from kerasps import _compat, variables
from kerasps.compute import Compute
from kerasps.failures import translated_errors
from kerasps.push import Push
from kerasps.storage import plain_variable
from kerasps.strategy import ParameterServerStrategy
from kerasps.variables import ParameterServerVariable

_Result = TypeVar("_Result")

_installed = False


def install(strategy: ParameterServerStrategy) -> None:
    """Hooks Keras for the one strategy of this process; the second call does nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    keras.Variable.__new__ = staticmethod(variables.make_parameter_server_variable)
    _hook_optimizers()
    _hook_take()
    _hook_trainer()
    _hook_saving()
    _hook_checkpoints(strategy)


def _hook_optimizers() -> None:
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
        return phase.learning_rate if isinstance(phase, Push) and phase.optimizer is self else original(self)

    @_wraps(base, "apply")
    def apply(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> None:
        trainable_variables = None if trainable_variables is None else list(trainable_variables)
        if isinstance(variables.phase(), Compute):
            # Of a table, a step has few rows: summed for each of them, a gradient is small, and no longer a special case.
            grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        if isinstance(variables.phase(), Compute) and not self.built and trainable_variables is not None:
            with tf.init_scope(), variables.entering(None):
                self.build(trainable_variables)
        original(self, grads, trainable_variables)

    @_wraps(keras.optimizers.LossScaleOptimizer, "apply")
    def apply_scaled(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        strategy = tf.distribute.get_strategy()
        if isinstance(strategy, ParameterServerStrategy) and tf.distribute.in_cross_replica_context():
            # In the scope, but not in a step. Keras refuses this under any strategy; here there are no replicas to agree.
            with _without_current(strategy):
                original(self, *args, **kwargs)
        else:
            original(self, *args, **kwargs)

    @_wraps(backend, "add_variable_from_reference")
    def add_variable_from_reference(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        with variables.entering(None):  # a slot lies beside the storage, not beside the value of a step
            return original(self, *args, **kwargs)

    @_wraps(backend, "_var_key")
    def var_key(original: Any, self: Any, variable: Any) -> Any:
        return variable.storage._unique_id if isinstance(variable, ParameterServerVariable) else original(self, variable)

    @_wraps(backend, "_apply_weight_decay")
    def apply_weight_decay(original: Any, self: Any, trainable_variables: Any) -> None:
        if isinstance(variables.phase(), Push):  # TensorFlow's takes storages, which in a push may be rows of one
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


@contextlib.contextmanager
def _without_current(strategy: ParameterServerStrategy) -> Iterator[None]:
    """While active, no strategy is current, also inside `strategy.scope()`; new variables belong to `strategy` all the same."""
    _compat.push_per_thread_mode(_compat.get_default_replica_mode())
    try:
        # The next creator would be the strategy's, which works only while it is current.
        with (
            tf.variable_creator_scope(lambda next_creator, **kwargs: plain_variable(**kwargs)),
            variables.creating_under(strategy),
        ):
            yield
    finally:
        _compat.pop_per_thread_mode()


def _hook_take() -> None:
    @_wraps(_compat.keras_numpy, "take")
    def take(original: Any, x: Any, indices: Any, axis: int | None = None) -> Any:
        # Keras's reads all of `x`; this is how `keras.layers.Embedding` looks rows up.
        if axis != 0 or not isinstance(x, ParameterServerVariable):
            return original(x, indices, axis)
        num_rows = x.shape[0]

        def from_start(ids: tf.Tensor) -> tf.Tensor:
            return ids if ids.dtype.is_unsigned else tf.where(ids < 0, ids + tf.cast(num_rows, ids.dtype), ids)

        if isinstance(indices, tf.RaggedTensor):
            return indices.with_flat_values(x.take(from_start(indices.flat_values)))
        if isinstance(indices, tf.SparseTensor):
            indices = tf.sparse.to_dense(indices)  # Keras too looks up id 0 where there is none
        return x.take(from_start(tf.convert_to_tensor(indices)))


def _hook_trainer() -> None:
    from kerasps import trainer

    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        ours = getattr(trainer, name)

        @_wraps(_compat.TensorFlowTrainer, name)
        def method(original: Any, self: Any, *args: Any, _ours: Any = ours, **kwargs: Any) -> Any:
            return _ours(original, self, *args, **kwargs) if trainer.is_ours(self) else original(self, *args, **kwargs)


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
