"""Keeps resources that TensorFlow finds by name when this process connects to a cluster.

These are mainly variables and lookup tables that this process made before it connected. Iterators
and compiled functions survive the connection (`connect.py`): their handles refer to the objects
directly. TensorFlow finds a table by its name, and the server that starts in this process begins
without names. So this module reads the content of tables before, and restores it under their names
after. Every handle of a table, also one in a compiled function or a dataset, then refers to it
again.

TensorFlow reads a variable by its handle and assigns it by its name, which would be two different
variables after the connection. So each variable gets a new handle. The functions that were compiled
with the old handle, and the datasets whose functions use it (`earlier_datasets.py`), get it too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.connection.earlier_datasets import EarlierDatasets
from kerasps.runtime.live_objects import live_objects

# The container of resources without a name: they belong to the holders of their handles.
_ANONYMOUS = "Anonymous"

# Words for users for types of resources that cannot be made again; other types have TensorFlow's
# name. The type is a mangled C++ name, in which the length of each word precedes it.
_WORDS = {
    "SummaryWriterInterface": "file writer of tf.summary",
    "QueueInterface": "queue",
    "Var": "variable made with a name",
}


@dataclass(frozen=True)
class _Resource:
    name: str
    container: str
    type: str
    specs: tuple[tf.TensorSpec, ...] = field(compare=False)

    @classmethod
    def of(cls, handle: tf.Tensor) -> _Resource:
        """Read the record in a handle.

        TensorFlow writes the record's length, in groups of seven bits, and then the record.
        """
        content = tf.io.serialize_tensor(handle).numpy()
        record = type(tf.make_tensor_proto(0)).FromString(content).tensor_content
        start = next(position for position, byte in enumerate(record) if byte < 128) + 1
        proto = _compat.ResourceHandleProto.FromString(record[start:])
        specs = tuple(tf.TensorSpec(part.shape, part.dtype) for part in proto.dtypes_and_shapes)
        return cls(proto.name, proto.container, proto.maybe_type_name, specs)

    @property
    def is_variable(self) -> bool:
        """True for a variable that TensorFlow finds by its handle."""
        return self.container == _ANONYMOUS and self.type.endswith("3VarE")

    def __str__(self) -> str:
        words = (word for name, word in _WORDS.items() if self.type.endswith(f"{len(name)}{name}E"))
        return f"{next(words, self.type)} {self.name!r}"


class EarlierResources:
    """The resources of this process that TensorFlow finds by name, and functions to restore them.

    Args:
        handles: all handles of variables, with the resources that they refer to. A variable may
            have several, also when Python has collected it: functions and datasets hold them.
    """

    def __init__(
        self,
        remake: dict[_Resource, Callable[[], None]],
        unrecoverable: list[_Resource],
        variables: list[Any],
        handles: list[tuple[tf.Tensor, _Resource]],
        functions: list[Any],
        datasets: EarlierDatasets,
    ) -> None:
        self._remake = remake
        self._unrecoverable = unrecoverable
        self._variables = variables
        self._handles = handles
        self._functions = functions
        self._datasets = datasets

    @classmethod
    def find(cls) -> EarlierResources:
        """Find all such resources, and read the content of tables.

        Call before this process starts its server.
        """
        handles, owners, writers, variables, functions, datasets = _living()
        records = [(handle, _Resource.of(handle)) for handle in handles]
        named = {resource for _, resource in records if resource.container != _ANONYMOUS}
        of_variables = [(handle, resource) for handle, resource in records if resource.is_variable]
        using = EarlierDatasets(datasets, [handle for handle, _ in of_variables], functions)
        for writer in writers:
            resource = _Resource.of(writer._resource)
            if writer._closed:
                named.discard(resource)
            else:
                # This flushes its events to the file; a later write raises TensorFlow's error that
                # the writer is closed.
                writer.close()
        remake: dict[_Resource, Callable[[], None]] = {}
        for owner in owners:
            resource = _Resource.of(owner._resource_handle)
            if resource in named and resource not in remake:
                remake[resource] = _remaking(owner)
        unrecoverable = sorted(named - set(remake), key=str)
        return cls(remake, unrecoverable, variables, of_variables, functions, using)

    def restore(self) -> None:
        """Make the resources again, under their names. Call after this process started its server.

        Warn about those that cannot be made again.
        """
        self._renew_handles()
        unrecoverable: list[Any] = list(self._unrecoverable)
        for resource, remake in self._remake.items():
            try:
                remake()
            except tf.errors.OpError:
                unrecoverable.append(resource)
        unrecoverable += [
            f"a dataset that uses variables, {dataset}" for dataset in self._datasets.unrecoverable
        ]
        if unrecoverable:
            warnings.warn(
                "Connecting to the cluster ended objects that TensorFlow finds by name and kerasps "
                "cannot make again. Expected: objects such as models, variables, tables, datasets "
                "and iterators, which survive. Received, made before the strategy: "
                f"{', '.join(map(str, unrecoverable))}. Make the strategy first, then these.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _renew_handles(self) -> None:
        resources = {id(handle): resource for handle, resource in self._handles}
        fresh: dict[_Resource, tf.Tensor] = {}
        for variable in self._variables:
            resource = resources.get(id(variable._handle))
            if resource is not None:
                if resource not in fresh:
                    fresh[resource] = _copied(variable._handle, resource)
                variable._handle = fresh[resource]
        renewed: dict[int, tf.Tensor] = {}
        for handle, resource in self._handles:
            if resource not in fresh:
                fresh[resource] = _copied(handle, resource)
            renewed[id(handle)] = fresh[resource]
        for function in self._functions:
            captured = function._captured_inputs
            if any(id(handle) in renewed for handle in captured):
                function.set_external_captures([renewed.get(id(h), h) for h in captured])
        self._datasets.remake(renewed)


def _copied(handle: tf.Tensor, resource: _Resource) -> tf.Tensor:
    """Return the handle of a copy of a variable; if it has no value, return `handle`."""
    (spec,) = resource.specs
    with tf.device(handle.device):
        try:
            value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=spec.dtype)
        except tf.errors.OpError:
            return handle
        return _compat.ResourceVariable(value, shape=spec.shape, dtype=spec.dtype)._handle


def _living() -> tuple[list[tf.Tensor], list[Any], list[Any], list[Any], list[Any], list[Any]]:
    """Return all handles, owners of resources, writers, variables, compiled functions and datasets.

    An owner is an object that can make its resource again.
    """
    handles, owners, writers, variables, functions, datasets = [], [], [], [], [], []
    # No other list has them all: those of a dataset or a layer are in no list.
    for thing in live_objects():
        # Not isinstance: it may run code of an object that imitates another class.
        kind = type(thing)
        if kind is tf.__internal__.EagerTensor:
            if thing.dtype == tf.resource:
                handles.append(thing)
        elif issubclass(kind, tf.summary.SummaryWriter) and "_resource" in vars(thing):
            writers.append(thing)
        elif issubclass(kind, _compat.CapturableResource) and _has_resource(thing):
            owners.append(thing)
        elif (
            issubclass(kind, tf.Variable)
            and type(vars(thing).get("_handle")) is tf.__internal__.EagerTensor
        ):
            variables.append(thing)
        elif issubclass(kind, tf.types.experimental.ConcreteFunction):
            functions.append(thing)
        elif (
            issubclass(kind, tf.data.Dataset)
            and type(vars(thing).get("_variant_tensor_attr")) is tf.__internal__.EagerTensor
        ):
            datasets.append(thing)
    return handles, owners, writers, variables, functions, datasets


def _has_resource(owner: Any) -> bool:
    if "_resource_handle_value" not in vars(owner):  # it is still being made
        return False
    handle = owner._resource_handle_value
    return type(handle) is tf.__internal__.EagerTensor and handle.dtype == tf.resource


def _remaking(owner: Any) -> Callable[[], None]:
    """Return a function that makes the owner's resource again, with its current content."""
    if hasattr(owner, "export"):
        return _remaking_table(owner)

    def remake() -> None:
        _create(owner)
        owner._initialize()

    return remake


def _remaking_table(
    table: tf.lookup.StaticHashTable | tf.lookup.experimental.MutableHashTable,
) -> Callable[[], None]:
    is_static = not hasattr(table, "insert")
    try:
        content = table.export()
    except tf.errors.FailedPreconditionError:  # not initialized yet; its maker will do that
        content = None

    def remake() -> None:
        _create(table)
        if content is not None:
            put = tf.raw_ops.InitializeTableV2 if is_static else tf.raw_ops.LookupTableImportV2
            put(table_handle=table._resource_handle, keys=content[0], values=content[1])

    return remake


def _create(owner: Any) -> None:
    """Make a new resource for an owner, and give the owner its handle if that differs.

    Keep the old handle if it refers to the new resource, because others hold it too.
    """
    with tf.device(owner._resource_device):
        handle = owner._create_resource()
    if _Resource.of(handle) != _Resource.of(owner._resource_handle):
        owner._resource_handle = handle
