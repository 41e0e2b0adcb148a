"""Patches of TensorFlow and Keras for a dry run, beside those of `hooks`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from kerasps._private_names import FIT
from kerasps.dynamic.parts.room import MOST_PLACES
from kerasps.dynamic.tables.row_access import RowAccess
from kerasps.dynamic.tables.table import KeyedVariable
from kerasps.dynamic.tables.table_access import TableAccess
from kerasps.hooks.in_place import Original
from kerasps.hooks.patch import KERAS, TENSORFLOW, Patch
from kerasps.tools.plan.dry_run import DRY_RUN, HereInstead, PlanError, here_instead
from kerasps.variables.rows.pooled_rows import PooledRows
from kerasps.variables.storage.named import NamedVariable

_FIT_ONLY = (
    "`kerasps plan` plans `model.fit`, `evaluate`, `predict` and the methods on one batch, of a "
    "model of a `kerasps.ParameterServerStrategy`."
)


def device(original: Original, self: object, name: object) -> Any:
    """`Context.device`: use a device of this process in place of a task's device."""
    text = name.to_string() if isinstance(name, tf.DeviceSpec) else getattr(name, "name", name)
    if text is None:
        return HereInstead(None, original(self, None))
    instead = here_instead(str(text))
    if instead is None:
        return original(self, name)
    here, ps = instead
    return HereInstead(ps, original(self, here))


def make_variable(original: Original, self: tf.Variable, *args: object, **kwargs: object) -> None:
    """`ResourceVariable.__init__`: note the missing device, and that a large one has no value."""
    self._absent_device = DRY_RUN.device
    if isinstance(self, NamedVariable):
        self._is_left_out = DRY_RUN.leaves_out(kwargs["shape"], kwargs["dtype"])
    original(self, *args, **kwargs)


def device_of(original: Original, self: tf.Variable) -> Any:
    """`ResourceVariable.device`: return the device that would hold the variable."""
    return getattr(self, "_absent_device", None) or original(self)


def takes_values(original: Original, self: NamedVariable) -> bool:
    """`NamedVariable.takes_values`: write no values of large variables."""
    return not getattr(self, "_is_left_out", False)


def do_nothing(original: Original, self: object, *args: object, **kwargs: object) -> None:
    """Do nothing in place of a method of kerasps."""


def read_variable(original: Original, self: NamedVariable, *args: object, **kwargs: object) -> Any:
    """`NamedVariable._read_variable_op`: read zeros if a large variable has no value."""
    if tf.executing_eagerly() and _has_no_value(self):
        return tf.zeros(self.shape, self.dtype)
    return original(self, *args, **kwargs)


def read_rows(
    original: Original, self: NamedVariable, indices: object, name: str | None = None
) -> Any:
    """`NamedVariable.sparse_read`: read rows of zeros if a large variable has no value."""
    if tf.executing_eagerly() and _has_no_value(self):
        return tf.zeros([*tf.convert_to_tensor(indices).shape, *self.shape[1:]], self.dtype)
    return original(self, indices, name)


def read_pooled(original: Original, self: PooledRows, view: object, places: object) -> Any:
    """`PooledRows._read`: read rows of zeros, since tables that share a storage have no values."""
    if tf.executing_eagerly():
        return tf.zeros([*tf.convert_to_tensor(places).shape, *self.shape[1:]], self.dtype)
    return original(self, view, places)


def write_pooled(
    original: Original, self: PooledRows, value: object, *args: object, **kw: object
) -> Any:
    """`PooledRows.assign`: leave tables that share a storage without values."""
    return self if tf.executing_eagerly() else original(self, value, *args, **kw)


def places_on(original: Original, device: str, row_bytes: int) -> int:
    """`places_on`: return as many places as there may be, which have no memory."""
    return MOST_PLACES


def no_rows(original: Original, self: KeyedVariable) -> int:
    """`KeyedVariable.num_rows`: return 0, since no step makes rows."""
    return 0


def look_up_none(original: Original, self: KeyedVariable, ids: tf.Tensor) -> tf.Tensor:
    """`KeyedVariable._look_up`: read rows of zeros, since there are none."""
    return tf.zeros(tf.concat([tf.shape(ids), self._value.shape[1:]], 0), self._value.dtype)


def read_no_rows(original: Original, self: RowAccess, ids: np.ndarray) -> np.ndarray:
    """`RowAccess.read`: return rows of zeros, since there are none."""
    return np.zeros([len(ids), self.width], self.dtype.as_numpy_dtype)


def no_ids(original: Original, self: TableAccess) -> np.ndarray:
    """`TableAccess.sorted_ids`: return none, since there are no rows."""
    return np.zeros(0, np.int64)


def no_items(original: Original, self: RowAccess, batch: int) -> Iterator[Any]:
    """`RowAccess.items`: return none, since there are no rows."""
    return iter(())


def _has_no_value(variable: object) -> bool:
    # The patched methods are TensorFlow's, so other variables call them too.
    if not isinstance(variable, NamedVariable) or variable.takes_values:
        return False
    return not bool(tf.raw_ops.VarIsInitializedOp(resource=variable.handle))


def make_function(
    original: Original, self: keras.Model, *args: object, **kwargs: object
) -> NoReturn:
    """`Trainer.make_train_function` and its siblings: refuse steps of plain Keras."""
    raise PlanError(
        f"The script runs steps of model '{self.name}', which no ParameterServerStrategy trains; "
        f"they would run in this process. {_FIT_ONLY} Expected: a model that is made and compiled "
        f"in `strategy.scope()`. Received: a model of {_strategy_of(self)}. Make it in the scope."
    )


def _strategy_of(model: keras.Model) -> str:
    strategy = getattr(model, "_distribute_strategy", None)
    return "no strategy" if strategy is None else f"a {type(strategy).__name__}"


def make_coordinator(original: Original, cls: type, *args: object, **kwargs: object) -> NoReturn:
    """`ClusterCoordinator.__new__`: refuse a custom loop, whose functions run on workers."""
    raise PlanError(
        f"The script has a custom training loop, whose functions run on workers. {_FIT_ONLY} "
        "Expected: a script that calls one of them. Received: a `ClusterCoordinator`. Write a "
        "script that makes the same model, compiles it and calls `fit`."
    )


def save(
    original: Original, self: keras.Model, filepath: object, *args: object, **kw: object
) -> None:
    """`keras.Model.save` and `save_weights`: write nothing, since large values do not exist."""
    print(
        f"kerasps plan: model '{self.name}' is not saved to {filepath}: a plan writes no models",
        file=sys.stderr,
        flush=True,
    )


def make_other(original: Original, self: object, *args: object, **kwargs: object) -> NoReturn:
    """Refuse another strategy, in place of its constructor."""
    raise PlanError(
        f"The script makes a {type(self).__name__}. {_FIT_ONLY} Expected: a "
        f"`kerasps.ParameterServerStrategy`. Received: a {type(self).__name__}. Make the former "
        "to plan the training."
    )


_VARIABLE = "ResourceVariable"
_NAMED = "kerasps.variables.storage.named:NamedVariable"
_KEYED = "kerasps.dynamic.tables.table:KeyedVariable"
_ACCESS = "kerasps.dynamic.tables.row_access"
_TABLE_ACCESS = "kerasps.dynamic.tables.table_access"
_POOLED = "kerasps.variables.rows.pooled_rows:PooledRows"
# Only `kerasps plan` installs them.
# fmt: off
PATCHES: tuple[Patch, ...] = (
    Patch("Context", "device", device, FIT, "a dry run has no tasks", TENSORFLOW),
    Patch("keras:Model", "make_train_function", make_function, FIT,
          "a dry run runs no steps", KERAS),
    Patch("keras:Model", "make_test_function", make_function, FIT,
          "a dry run runs no steps", KERAS),
    Patch("keras:Model", "make_predict_function", make_function, FIT,
          "a dry run runs no steps", KERAS),
    Patch("tensorflow:distribute.coordinator.ClusterCoordinator", "__new__", make_coordinator, FIT,
          "a dry run runs no steps", TENSORFLOW),
    Patch("keras:Model", "save", save, FIT, "large values are left out", KERAS),
    Patch("keras:Model", "save_weights", save, FIT, "large values are left out", KERAS),
    Patch("kerasps:WorkerDrivenStrategy", "__init__", make_other, FIT,
          "a dry run has no tasks", KERAS),
    Patch("kerasps:CentralStorageStrategy", "__init__", make_other, FIT,
          "a dry run runs no steps", KERAS),
    Patch("kerasps:LocalCluster", "_start_all", do_nothing, FIT, "a dry run has no tasks", KERAS),
    Patch("kerasps.tools.monitoring.sockets:StatusSocket", "start", do_nothing, FIT,
          "a dry run has no status", KERAS),
    Patch("kerasps.step.updates.lazy_updates:LazyUpdates", "note", do_nothing, FIT,
          "a dry run runs no steps", KERAS),
    Patch(_VARIABLE, "__init__", make_variable, FIT, "large values are left out", TENSORFLOW),
    Patch(_VARIABLE, "device", device_of, FIT, "a dry run has no tasks", TENSORFLOW),
    Patch(_NAMED, "takes_values", takes_values, FIT, "large values are left out", TENSORFLOW),
    Patch(_NAMED, "_read_variable_op", read_variable, FIT, "large values are left out",
          TENSORFLOW),
    Patch(_NAMED, "sparse_read", read_rows, FIT, "large values are left out", TENSORFLOW),
    Patch("kerasps.dynamic.parts.room", "places_on", places_on, FIT, "a dry run has no tasks",
          TENSORFLOW),
    Patch(_KEYED, "num_rows", no_rows, FIT, "a dry run makes no rows", TENSORFLOW),
    Patch(_KEYED, "_look_up", look_up_none, FIT, "a dry run makes no rows", TENSORFLOW),
    Patch(f"{_ACCESS}:RowAccess", "read", read_no_rows, FIT, "a dry run makes no rows",
          TENSORFLOW),
    Patch(f"{_ACCESS}:RowAccess", "items", no_items, FIT, "a dry run makes no rows", TENSORFLOW),
    Patch(f"{_TABLE_ACCESS}:TableAccess", "sorted_ids", no_ids, FIT, "a dry run makes no rows",
          TENSORFLOW),
    Patch(_POOLED, "_read", read_pooled, FIT, "large values are left out", TENSORFLOW),
    Patch(_POOLED, "assign", write_pooled, FIT, "large values are left out", TENSORFLOW),
)
# fmt: on
