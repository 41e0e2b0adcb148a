"""Writes what changed in a model since its last delta, as the next one.

Rows of tables without a vocabulary come from `changed_since`. Weights are read whole and compared
with what was written last, and so are fixed tables, whose changed rows are written.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from numpy.typing import DTypeLike

from kerasps.dynamic.ids.rows_of_ids import RowsOfIds
from kerasps.errors import InputError
from kerasps.serving.writer import DeltaWriter, TableContent

# A fixed table that is larger is written by rows.
_WHOLE_BYTES = 1 << 20


class Values(NamedTuple):
    """The values of a model's weights at an instant."""

    values: dict[str, np.ndarray]  # by path
    step: int  # the updates of the optimizer
    read_at: float  # when reading began, in seconds since 1970


def tables_and_weights(model: keras.Model) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Return the layers of tables without a vocabulary, and other weights, by their paths.

    The third result are the paths of the weights that are embeddings of a `keras.layers.Embedding`.

    Raises:
        InputError: two weights have one path.
    """
    layers = list(model._flatten_layers())
    dynamic = [layer for layer in layers if hasattr(layer, "changed_since") and layer.built]
    in_tables = {id(weight) for layer in dynamic for weight in layer.weights}
    others = [weight for weight in model.weights if id(weight) not in in_tables]
    fixed = {
        weight.path
        for layer in layers
        if isinstance(layer, keras.layers.Embedding)
        for weight in layer.weights
        if len(weight.shape) == 2
    }
    paths = [*(layer.embeddings.path for layer in dynamic), *(weight.path for weight in others)]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise InputError(
            "Deltas know weights by their paths. Expected: a path for each weight. Received: "
            f"several weights with the path {', '.join(map(repr, twice))}. Give their layers names."
        )
    return (
        {layer.embeddings.path: layer for layer in dynamic},
        {weight.path: weight for weight in others},
        fixed,
    )


def entry_of(layer: Any) -> dict[str, Any]:
    """Return the entries of a manifest that say what the rows of a layer are."""
    rows: RowsOfIds = layer.rows_of_ids
    first = rows.first_rows
    if rows.reads_zeros:
        default = {"distribution": "constant", "first": 0.0}
    else:
        default = {
            "distribution": first.kind,
            "first": first.first,
            "second": first.second,
            "salt": int(rows.salt),
        }
    return {"width": first.width, "dtype": first.dtype, "default": default}


class ModelDeltas:
    """Writes the deltas of a model.

    Args:
        model: a built model.
        directory: of the deltas.
        keep: the number of chains that stay.
        row_dtype: the dtype of rows in files; None for their own.

    Attributes:
        model: as given.
    """

    def __init__(
        self, model: keras.Model, directory: Path, keep: int, row_dtype: DTypeLike | None
    ) -> None:
        self._layers, self._weights, fixed = tables_and_weights(model)
        self.model = model
        self._by_rows = {
            path
            for path in fixed & self._weights.keys()
            if int(np.prod(self._weights[path].shape)) * 4 > _WHOLE_BYTES
        }
        self._writer = DeltaWriter(directory, keep, row_dtype)
        since = self._writer.go_on() or {}
        # Another model begins another chain.
        is_same = since.get("weights") == self._specs and since.get("tables", {}).keys() == (
            self._layers.keys()
        )
        self._since: dict[str, Any] | None = since["tables"] if is_same else None
        # What was written last; empty in a new process.
        self._written: dict[str, np.ndarray] = {}

    @property
    def _specs(self) -> dict[str, str]:
        return {
            path: f"{weight.dtype}{list(weight.shape)}" for path, weight in self._weights.items()
        }

    def read(self) -> Values:
        """Read the weights. Call when no step is in flight."""
        read_at = time.time()
        optimizer = getattr(self.model, "optimizer", None)
        step = 0 if optimizer is None else int(keras.ops.convert_to_numpy(optimizer.iterations))
        values = {
            # A copy: on a CPU, the array may be the memory of the variable.
            path: np.array(keras.ops.convert_to_numpy(weight))
            for path, weight in self._weights.items()
        }
        return Values(values, step, read_at)

    def write(self, read: Values) -> None:
        """Write a delta with these weights, and the rows as they are now. Thread: one at a time.

        If it fails, the next delta has the changes of this one too.
        """
        since = None if self._writer.wants_base else self._since
        changes = self._changes(since)
        if since is not None and any(change.is_whole for change in changes.values()):
            since, changes = None, self._changes(None)
        is_base = since is None
        tables = {
            path: TableContent(c.pieces, c.removed, c.is_whole, entry_of(self._layers[path]))
            for path, c in changes.items()
        }
        written = {} if is_base else self._written
        weights = {}
        for path, value in read.values.items():
            if path in self._by_rows:
                tables[path] = _changed_rows(value, written.get(path))
            elif path not in written or not _same(value, written[path]):
                weights[path] = value
        versions = {path: [int(number) for number in c.version] for path, c in changes.items()}
        self._writer.write(
            is_base=is_base,
            read_at=read.read_at,
            step=read.step,
            tables=tables,
            weights=weights,
            since={"tables": versions, "weights": self._specs},
        )
        self._since, self._written = versions, read.values

    def _changes(self, since: Mapping[str, Sequence[int]] | None) -> dict[str, Any]:
        return {
            path: layer.changed_since(None if since is None else since.get(path))
            for path, layer in self._layers.items()
        }


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return True if two arrays have the same bits."""
    return one.tobytes() == other.tobytes()


def _changed_rows(value: np.ndarray, before: np.ndarray | None) -> TableContent:
    """Return the rows of a fixed table that differ from those that were written last."""
    if before is None:
        ids = np.arange(len(value))
    else:
        bits, bits_before = (array.view(np.uint8) for array in (value, before))
        ids = np.flatnonzero((bits != bits_before).any(axis=1))
    entry = {"width": value.shape[1], "dtype": value.dtype.name, "default": None}
    pieces: Iterable[tuple[np.ndarray, np.ndarray]] = [(ids, value[ids])]
    return TableContent(pieces, np.zeros(0, np.int64), before is None, entry)
