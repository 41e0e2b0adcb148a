"""Copies lookup tables that a step or a dataset uses to each worker, which uses its copy.

The table of a `StringLookup`, an `IntegerLookup` or a `TextVectorization` (a
`tf.lookup.StaticHashTable`) is in the process that made it. A function that captured it would call
that process for each batch. So the graph that a worker runs has a table with a name in place of the
captured one. Before the graph runs there, kerasps fills the worker's table: once, and again if the
worker restarted. It sends the content of a table separately and not in graphs, so a large
vocabulary makes no graph larger.

A table that can change (`tf.lookup.experimental.MutableHashTable`, `DenseHashTable`) is not copied:
all workers use it where it was made.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.errors import InputError
from kerasps.runtime.fetching import fetch
from kerasps.variables.storage.named import destroy
from kerasps.variables.storage.names import CALLS, NAMES

_Dtypes = tuple[tf.DType, tf.DType]

# By the `id` of the object that owns a lookup table, for as long as that object exists.
_OF_ORIGINALS: dict[int, _Copies] = {}


class LookupTables:
    """The lookup tables that a function captured and that workers have copies of.

    Raises InputError if a table has no contents yet.
    """

    def __init__(self, function: tf.types.experimental.ConcreteFunction) -> None:
        self._tables: dict[int, tuple[tf.Tensor, _Copies]] = {}
        self._owners: list[weakref.ref[Any]] = []
        finds = [
            node for node in _nodes(function.graph.as_graph_def()) if node.op == "LookupTableFindV2"
        ]
        if not finds:
            return
        # The operations on tables that can change name the device of the table's task.
        dtypes = {_dtypes(node) for node in finds} - {
            _dtypes(node) for node in finds if "/job:" in node.device
        }
        variables = {id(variable.handle) for variable in function.variables}
        for captured in function.captured_inputs:
            if captured.dtype == tf.resource and id(captured) not in variables:
                copies = _copies_of(captured, dtypes)
                if copies is not None:
                    self._tables[id(captured)] = captured, copies
                    owner = _compat.owner_of(captured)
                    self._owners += [] if owner is None else [weakref.ref(owner)]
        if self._tables:
            self._sizes = tf.function(self._read_sizes, autograph=False).get_concrete_function()

    def __bool__(self) -> bool:
        return bool(self._tables)

    @property
    def are_current(self) -> bool:
        """True if no table was replaced; a layer makes a new table when it is adapted."""
        return all(owner() is not None for owner in self._owners)

    def handles(self) -> dict[int, tf.Tensor]:
        """Return the worker's tables in the current graph, by the `id` of captured handles."""
        return {key: copies.table() for key, (_, copies) in self._tables.items()}

    def bring(self) -> None:
        """Fill the tables of the worker on whose device this runs.

        Call before a graph with `handles` runs there.
        """
        if self._tables:
            # One call returns the sizes of all: a worker that has them needs no further call.
            for (original, copies), size in zip(
                self._tables.values(), fetch([self._sizes()])[0], strict=True
            ):
                if size != copies.size:
                    copies.fill(original)

    def _read_sizes(self) -> tf.Tensor:
        return tf.stack(
            [
                tf.raw_ops.LookupTableSizeV2(table_handle=handle)
                for handle in self.handles().values()
            ]
        )


class _Copies:
    """The copies of one lookup table, of unchanging keys, under one name on every worker.

    They are destroyed when Python collects this object. Another table then reuses the name, unless
    a copy may still exist: no table may find an old copy under its name.
    """

    def __init__(self, keys: tf.Tensor, values: tf.Tensor) -> None:
        self.size = int(keys.shape[0])
        self._key_dtype, self._value_dtype = keys.dtype, values.dtype
        kind = "lookup table", keys.dtype.name, values.dtype.name
        self._name = NAMES.claim(kind)
        self._on_devices: dict[str, tf.Tensor] = {}
        weakref.finalize(self, _destroy_all, self._on_devices, kind, self._name).atexit = False

    def table(self) -> tf.Tensor:
        """Return the table on the current device; a new table is empty."""
        return tf.raw_ops.HashTableV2(
            container="",
            shared_name=self._name,
            key_dtype=self._key_dtype,
            value_dtype=self._value_dtype,
        )

    def fill(self, original: tf.Tensor) -> None:
        """Fill the table on the current device with the content of `original`."""
        keys, values = _contents(original, (self._key_dtype, self._value_dtype))
        table = self.table()
        self._on_devices[table.device] = table
        tf.raw_ops.InitializeTableV2(table_handle=table, keys=keys, values=values)


def _copies_of(handle: tf.Tensor, dtypes: Iterable[_Dtypes]) -> _Copies | None:
    """Return the copies of the lookup table of a handle, which has one pair of these dtypes."""
    # All functions that captured the table share the copies. A cached step graph keeps handles of
    # tables that no longer exist. So the original keeps the copies alive, and the objects that
    # fill them.
    copies: _Copies | None = handle.copies() if hasattr(handle, "copies") else None
    if copies is None:
        copies = _make_copies(handle, dtypes)
        owner = _compat.owner_of(handle)
        if copies is None:
            return None
        if owner is None:
            handle.copies = lambda: copies
        else:
            handle.copies = weakref.ref(copies)
            _OF_ORIGINALS[id(owner)] = copies
            weakref.finalize(owner, _OF_ORIGINALS.pop, id(owner), None).atexit = False
    return copies


def _make_copies(handle: tf.Tensor, dtypes: Iterable[_Dtypes]) -> _Copies | None:
    owner = _compat.owner_of(handle)
    if isinstance(
        owner, (tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)
    ):
        return None
    if isinstance(owner, tf.lookup.StaticHashTable):
        dtypes = [(owner.key_dtype, owner.value_dtype)]
    # If the owner is not known, neither are the dtypes. Try to read the contents with each pair;
    # for a resource that is not a table this raises an error.
    for candidate in dtypes:
        try:
            with tf.init_scope():
                keys, values = _contents(handle, candidate)
        except (tf.errors.FailedPreconditionError, tf.errors.AbortedError) as exc:
            raise InputError(
                "A lookup table that a batch needs has no contents. Expected: a vocabulary. "
                "Received: a table that was never filled. Call `adapt` or `set_vocabulary` on "
                "each lookup layer first, or pass it a `vocabulary`."
            ) from exc
        except tf.errors.OpError:
            continue  # another kind of resource, or other dtypes
        # No copy of an empty table: it would look like one that is not filled yet.
        return (
            _Copies(keys, values)
            if keys.shape.rank == values.shape.rank == 1 and keys.shape[0]
            else None
        )
    return None


def _contents(handle: tf.Tensor, dtypes: _Dtypes) -> tuple[tf.Tensor, tf.Tensor]:
    with tf.device(handle.device):
        keys, values = tf.raw_ops.LookupTableExportV2(
            table_handle=handle, Tkeys=dtypes[0], Tvalues=dtypes[1]
        )
    return keys, values


def _destroy_all(on_devices: dict[str, tf.Tensor], kind: Hashable, name: str) -> None:
    are_gone = [destroy(handle) for handle in on_devices.values()]
    if all(are_gone) and CALLS.are_waited_for:
        NAMES.give_back(kind, name)


def _nodes(graph_def: tf.compat.v1.GraphDef) -> Iterator[Any]:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def _dtypes(node: tf.compat.v1.NodeDef) -> _Dtypes:
    return tf.as_dtype(node.attr["Tin"].type), tf.as_dtype(node.attr["Tout"].type)
