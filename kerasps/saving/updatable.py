"""Exports SavedModels that deltas update while they serve.

A request reads the number of the current generation, answers from the tables and weights of that
generation, and reads the number again. If a delta was applied meanwhile, it answers anew. So no
request waits for a delta, and each answer is of one version.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.dynamic.parts.keyed_rows import KeyedStorage
from kerasps.dynamic.tables.row_files import TableValue
from kerasps.errors import InputError
from kerasps.runtime.connected import check_not_closed
from kerasps.saving.model_deltas import tables_and_weights
from kerasps.saving.saved_model import Export, StandIn
from kerasps.saving.updatable_tables import (
    GENERATIONS,
    Mutex,
    UpdatableTable,
    UpdatableWeight,
    variable,
)
from kerasps.serving.tensor_files import write_file
from kerasps.variables import ParameterServerVariable, entering
from kerasps.variables.rows.sharding import ShardedStorage, WholeValue

# The file beside the SavedModel that says which inputs of `apply_delta` take which tensors. Its
# directory is the place that TensorFlow leaves to other programs.
INPUTS_FILE = "assets.extra/kerasps_deltas.json"


class UpdatableExport(Export):
    """The phase in which a model is traced with the tables and weights of one generation."""

    def __init__(
        self,
        generation: int,
        tables: dict[str, UpdatableTable],
        weights: dict[str, UpdatableWeight],
    ) -> None:
        self._generation, self._tables, self._weights = generation, tables, weights

    def take(self, path: str, ids: tf.Tensor) -> tf.Tensor:
        """Return the rows of ids in a table without a vocabulary."""
        return self._tables[path].take(self._generation, ids)

    def read(self, variable: ParameterServerVariable) -> tf.Variable:
        weight = self._weights.get(variable.path)
        return super().read(variable) if weight is None else weight.values[self._generation]

    def value(self, path: str) -> tf.Tensor:
        """Return the value of a weight."""
        return self._weights[path].values[self._generation].read_value()


def export_updatable(
    model: keras.Model,
    filepath: str | os.PathLike[str],
    format: str = "tf_saved_model",
    verbose: bool | None = None,
    input_signature: Sequence[object] | None = None,
) -> None:
    """Write a SavedModel with the signatures `serve` and `apply_delta`.

    Args:
        filepath: the directory of the SavedModel.
        format: `"tf_saved_model"`.
        verbose: not used.
        input_signature: as for Keras's method `export`.

    Raises:
        InputError: another format is asked for, or the paths of two weights are equal.
    """
    del verbose
    check_not_closed("an export")
    if format != "tf_saved_model":
        raise InputError(
            "An export with `updatable=True` is a SavedModel. Expected: "
            f"format='tf_saved_model'. Received: format={format!r}. Leave out `format`."
        )
    served = _Served(model, _signature_of(model, input_signature))
    path = os.fspath(filepath)
    with entering(Export()):
        tf.saved_model.save(
            served,
            path,
            signatures={
                "serving_default": served.serve,
                "serve": served.serve,
                "apply_delta": served.apply_delta,
                "state": served.state,
            },
        )
    extra = Path(path) / INPUTS_FILE
    extra.parent.mkdir(exist_ok=True)
    write_file(extra, json.dumps(served.inputs, indent=1).encode())


def _signature_of(model: keras.Model, given: object) -> Any:
    """Return the signature of the inputs of a model, as TensorFlow has it."""
    return keras.tree.map_structure(
        lambda s: s if isinstance(s, tf.TypeSpec) else tf.TensorSpec(s.shape, s.dtype, s.name),
        _compat.input_signature_of(model) if given is None else given,
    )


class _Served(tf.Module):
    """The content of the SavedModel, and its functions."""

    def __init__(self, model: keras.Model, signature: Sequence[object]) -> None:
        super().__init__(name="served")
        layers, weights, fixed = tables_and_weights(model)
        # What deltas change. Lists, since paths have slashes, which object graphs do not take.
        tables = {path: _table_of(layer) for path, layer in layers.items()}
        values = {path: _weight_of(weight) for path, weight in weights.items()}
        self.tables, self.weights = list(tables.values()), list(values.values())
        # An even number: the requests read generation 0.
        self.generation = variable(np.int64(0))
        self.version = variable(np.int64(-1))
        self.mutex = Mutex()
        # Such as the vocabularies of lookup layers.
        self.resources = [
            attribute
            for layer in model._flatten_layers()
            for attribute in vars(layer).values()
            if isinstance(attribute, tf.saved_model.experimental.TrackableResource)
        ]
        self._tables, self._weights = tables, values
        names = _names([*tables, *values])
        self._names = names
        self._by_rows = sorted(fixed)
        self.inputs = {
            "tables": {path: names[path] for path in tables},
            "rows": {path: names[path] for path in self._by_rows},
            "weights": {path: names[path] for path in values if path not in fixed},
        }
        self.serve = self._serve(model, weights, signature)
        self.apply_delta = tf.function(
            self._apply, input_signature=[self._specs()], autograph=False
        )
        self.state = tf.function(self._state, input_signature=[], autograph=False)

    def _state(self) -> dict[str, tf.Tensor]:
        return {"version": self.version.read_value()}

    def _serve(
        self, model: keras.Model, weights: Mapping[str, object], signature: Sequence[object]
    ) -> Any:
        plain = {
            path: weight
            for path, weight in weights.items()
            if not isinstance(weight, ParameterServerVariable)
        }

        def of_generation(generation: int) -> Any:
            phase = UpdatableExport(generation, self._tables, self._weights)

            def call(*inputs: object) -> Any:
                with entering(phase):
                    if not plain:
                        return model(*inputs)
                    values = [(weight, phase.value(path)) for path, weight in plain.items()]
                    with keras.StatelessScope(values):
                        return model(*inputs)

            return tf.function(call, input_signature=signature, autograph=False)

        calls = [of_generation(generation) for generation in GENERATIONS]

        def attempt(*inputs: object) -> Any:
            before = self.generation.read_value()
            with tf.control_dependencies([before]):
                answers = tf.cond(
                    tf.equal(before % 2, 0), lambda: calls[0](*inputs), lambda: calls[1](*inputs)
                )
            with tf.control_dependencies(tf.nest.flatten(answers, expand_composites=True)):
                after = self.generation.read_value()
            return tf.equal(before, after), answers

        attempt = tf.function(attempt, input_signature=signature, autograph=False)

        def serve(*inputs: object) -> Any:
            _, answers = tf.while_loop(
                lambda is_valid, answers: tf.logical_not(is_valid),
                lambda is_valid, answers: attempt(*inputs),
                attempt(*inputs),
            )
            return answers

        return tf.function(serve, input_signature=signature, autograph=False)

    def _specs(self) -> dict[str, tf.TensorSpec]:
        """Return the inputs of `apply_delta`."""
        specs: dict[str, tuple[Any, Any]] = {"version": ([], tf.int64), "is_base": ([], tf.bool)}
        ids = ([None], tf.int64)
        for path, table in self._tables.items():
            name = self._names[path]
            specs[f"{name}_ids"] = specs[f"{name}_removed"] = ids
            specs[f"{name}_rows"] = ([None, table.rows.shape[1]], table.rows.dtype)
            specs[f"{name}_is_whole"] = ([], tf.bool)
        for path, weight in self._weights.items():
            name, held = self._names[path], weight.values[0]
            if path in self._by_rows:
                specs[f"{name}_ids"] = ids
                specs[f"{name}_rows"] = ([None, held.shape[1]], held.dtype)
            else:
                specs[name] = (held.shape, held.dtype)
                specs[f"{name}_is_given"] = ([], tf.bool)
        return {
            name: tf.TensorSpec(shape, dtype, name=name) for name, (shape, dtype) in specs.items()
        }

    def _apply(self, delta: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Apply a delta: requests see all of it or none."""
        lock = self.mutex.locked()
        with tf.control_dependencies([lock]):
            before = self.version.read_value()
        follows = tf.debugging.Assert(
            delta["is_base"] | tf.equal(delta["version"], before + 1),
            ["This delta does not follow the last one. Their versions:", delta["version"], before],
        )
        fitting = [
            tf.debugging.Assert(
                self._are_rows(path, delta), [f"{path} has no rows of these numbers."]
            )
            for path in self._by_rows
        ]
        with tf.control_dependencies([follows, *fitting]):
            generation = self.generation.read_value()
            is_whole = {
                path: delta["is_base"] | delta[f"{self._names[path]}_is_whole"]
                for path in self._tables
            }
            places = {
                path: table.write_rows(
                    delta[f"{self._names[path]}_ids"],
                    delta[f"{self._names[path]}_rows"],
                    delta[f"{self._names[path]}_removed"],
                    is_whole[path],
                )
                for path, table in self._tables.items()
            }
        is_even = tf.equal(generation % 2, 0)
        with tf.control_dependencies(list(places.values())):
            other = tf.cond(
                is_even,
                lambda: self._change(1, delta, places, is_whole),
                lambda: self._change(0, delta, places, is_whole),
            )
        with tf.control_dependencies([other]):
            switch = [
                self.version.assign(delta["version"], read_value=False),
                self.generation.assign_add(1, read_value=False),
            ]
        with tf.control_dependencies(switch):
            same = tf.cond(
                is_even,
                lambda: self._change(0, delta, places, is_whole),
                lambda: self._change(1, delta, places, is_whole),
            )
        with tf.control_dependencies([same]):
            done = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        with tf.control_dependencies([done]):
            return {"version": tf.identity(delta["version"])}

    def _are_rows(self, path: str, delta: dict[str, tf.Tensor]) -> tf.Tensor:
        """Return True if the ids of a fixed table are numbers of its rows."""
        ids = delta[f"{self._names[path]}_ids"]
        most = int(self._weights[path].values[0].shape[0])
        return tf.reduce_all((ids >= 0) & (ids < most))

    def _change(
        self,
        generation: int,
        delta: dict[str, tf.Tensor],
        places: dict[str, tf.Tensor],
        is_whole: dict[str, tf.Tensor],
    ) -> tf.Tensor:
        """Change the hash tables and weights of a generation."""
        done = []
        for path, table in self._tables.items():
            name = self._names[path]
            ids, removed = delta[f"{name}_ids"], delta[f"{name}_removed"]
            done.append(table.name_places(generation, ids, places[path], removed, is_whole[path]))
        for path, weight in self._weights.items():
            name = self._names[path]
            if path in self._by_rows:
                ids, rows = delta[f"{name}_ids"], delta[f"{name}_rows"]
                done.append(weight.set_rows(generation, ids, rows))
            else:
                done.append(weight.set(generation, delta[name], delta[f"{name}_is_given"]))
        with tf.control_dependencies(done):
            return tf.constant(0)


def _table_of(layer: keras.layers.Layer) -> UpdatableTable:
    """Return a table with the rows of a layer."""
    storage = getattr(layer.embeddings, "storage", None)
    width = layer.output_dim
    if isinstance(storage, KeyedStorage):
        # The ps write them into the checkpoint of the SavedModel.
        ids = StandIn(
            TableValue(storage, is_ids=True), shape=tf.TensorShape([None]), trainable=False
        )
        rows = StandIn(
            TableValue(storage, is_ids=False), shape=tf.TensorShape([None, width]), trainable=False
        )
    else:
        pieces = list(layer.items())
        dtype = tf.as_dtype(layer.rows_of_ids.first_rows.dtype).as_numpy_dtype
        all_ids = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in pieces)])
        all_rows = np.concatenate([np.zeros([0, width], dtype), *(rows for _, rows in pieces)])
        ids = variable(all_ids, shape=[None])
        rows = variable(all_rows, shape=[None, width])
    return UpdatableTable(ids, rows, layer.rows_of_ids)


def _weight_of(weight: keras.Variable) -> UpdatableWeight:
    """Return a weight with the value of a model's."""
    storage = getattr(weight, "storage", None)
    if isinstance(storage, ShardedStorage):
        stored = WholeValue(storage)
        return UpdatableWeight(
            [StandIn(stored, shape=storage.shape, trainable=False) for _ in GENERATIONS]
        )
    value = keras.ops.convert_to_numpy(weight)
    return UpdatableWeight([variable(np.array(value)) for _ in GENERATIONS])


def _names(paths: Sequence[str]) -> dict[str, str]:
    """Return a name for each path that an input of a signature can have."""
    names: dict[str, str] = {}
    for path in paths:
        name = re.sub(r"\W", "_", path)
        while name in names.values():
            name += "_"
        names[path] = name
    return names
