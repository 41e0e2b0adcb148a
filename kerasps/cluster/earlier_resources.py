"""Saves resources that TensorFlow finds by name across the connection to a cluster.

These are, above all, variables and lookup tables that this process made before it connected.
Iterators and compiled functions outlive the connection (`connection.py`): whoever has a handle of
theirs has the thing itself. A table is found by its name, and a server that starts in this process
begins with no names. So a table's content is taken before, and put back under its name after. Every
handle of it, also one that a compiled function or a dataset holds, leads to it again.

A variable is read by its handle and assigned by its name, which would be another variable from here
on. So each gets a new handle, and so do the functions that were compiled with the old one. A
dataset from before reads the value that the variable had then.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps import _compat

# The container of resources that nobody finds by name: they belong to the holders of their handles.
_ANONYMOUS = "Anonymous"

# Users' words for types of resources that cannot be made again; other types go by TensorFlow's
# word. The type is a mangled C++ name, in which each word stands behind its length.
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

    @classmethod
    def of(cls, handle: tf.Tensor) -> _Resource:
        """Read the record in a handle.

        TensorFlow writes the record's length, in groups of seven bits, and then the record.
        """
        content = tf.io.serialize_tensor(handle).numpy()
        record = _compat.TensorProto.FromString(content).tensor_content
        start = next(position for position, byte in enumerate(record) if byte < 128) + 1
        proto = _compat.ResourceHandleProto.FromString(record[start:])
        return cls(proto.name, proto.container, proto.maybe_type_name)

    def __str__(self) -> str:
        words = (word for name, word in _WORDS.items() if self.type.endswith(f"{len(name)}{name}E"))
        return f"{next(words, self.type)} {self.name!r}"


class EarlierResources:
    """The resources of this process that are found by name, and how to make each again.

    Args:
        remake: a function per resource that makes it again.
        lost: the resources that nobody can make again.
        variables: all of TensorFlow's variables, which need new handles.
        functions: all compiled functions, which may hold handles of these.
    """

    def __init__(
        self,
        remake: dict[_Resource, Callable[[], None]],
        lost: list[_Resource],
        variables: list[Any],
        functions: list[Any],
    ) -> None:
        self._remake = remake
        self._lost = lost
        self._variables = variables
        self._functions = functions

    @classmethod
    def find(cls) -> EarlierResources:
        """Find all such resources, and take the content of tables.

        Call before this process starts its server.
        """
        handles, owners, writers, variables, functions = _living()
        named = {
            resource for resource in map(_Resource.of, handles) if resource.container != _ANONYMOUS
        }
        for writer in writers:
            resource = _Resource.of(writer._resource)
            if writer._closed:
                named.discard(resource)
            else:
                # Its events are in the file then, and TensorFlow tells whoever writes on that it is
                # closed.
                writer.close()
        remake: dict[_Resource, Callable[[], None]] = {}
        for owner in owners:
            resource = _Resource.of(owner._resource_handle)
            if resource in named and resource not in remake:
                remake[resource] = _remaking(owner)
        return cls(remake, sorted(named - set(remake), key=str), variables, functions)

    def restore(self) -> None:
        """Make the resources again, under their names. Call when this process has its server.

        Warns of those that cannot be made again.
        """
        _renew_handles(self._variables, self._functions)
        lost = list(self._lost)
        for resource, remake in self._remake.items():
            try:
                remake()
            except tf.errors.OpError:
                lost.append(resource)
        if lost:
            warnings.warn(
                "Connecting to the cluster ended what TensorFlow finds by name and kerasps cannot "
                "make again. Expected: objects such as models, variables, tables, datasets and "
                "iterators, which live on. Received, made before the strategy: "
                f"{', '.join(map(str, lost))}. Make the strategy first, then these.",
                RuntimeWarning,
                stacklevel=5,
            )


def _living() -> tuple[list[tf.Tensor], list[Any], list[Any], list[Any], list[Any]]:
    """Return all handles, owners of resources, writers, variables and compiled functions.

    An owner is an object that can make its resource again.
    """
    handles, owners, writers, variables, functions = [], [], [], [], []
    # Nothing else knows them all: a dataset's or a layer's are in nobody's list.
    for thing in gc.get_objects():
        # Not isinstance: it may run the code of an object that poses as another.
        kind = type(thing)
        if kind is _compat.EagerTensor:
            if thing.dtype == tf.resource:
                handles.append(thing)
        elif issubclass(kind, _compat.ResourceSummaryWriter):
            writers.append(thing)
        elif issubclass(kind, _compat.CapturableResource) and _has_resource(thing):
            owners.append(thing)
        elif (
            issubclass(kind, _compat.BaseResourceVariable)
            and type(vars(thing).get("_handle")) is _compat.EagerTensor
        ):
            variables.append(thing)
        elif issubclass(kind, _compat.ConcreteFunction):
            functions.append(thing)
    return handles, owners, writers, variables, functions


def _renew_handles(variables: list[Any], functions: list[Any]) -> None:
    renewed: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
    for variable in variables:
        old = variable._handle
        try:
            with tf.device(variable.device):
                fresh = _compat.ResourceVariable(
                    variable.read_value(), shape=variable.shape, dtype=variable.dtype
                )
        except tf.errors.OpError:  # without a value
            continue
        variable._handle = fresh._handle
        renewed[id(old)] = old, fresh._handle
    for function in functions:
        captured = function._captured_inputs
        if any(id(handle) in renewed for handle in captured):
            function.set_external_captures(
                [renewed[id(h)][1] if id(h) in renewed else h for h in captured]
            )


def _has_resource(owner: Any) -> bool:
    if "_resource_handle_value" not in vars(owner):  # it is still being made
        return False
    handle = owner._resource_handle_value
    return type(handle) is _compat.EagerTensor and handle.dtype == tf.resource


def _remaking(owner: Any) -> Callable[[], None]:
    """Return a function that makes the owner's resource again, with its content of now."""
    if hasattr(owner, "export"):
        return _remaking_table(owner)

    def remake() -> None:
        _create(owner)
        owner._initialize()

    return remake


def _remaking_table(table: Any) -> Callable[[], None]:
    is_static = isinstance(table, _compat.InitializableLookupTableBase)
    try:
        content = table.export()
    except tf.errors.FailedPreconditionError:  # not initialized yet; whoever made it will do it
        content = None

    def remake() -> None:
        _create(table)
        if content is not None:
            put = tf.raw_ops.InitializeTableV2 if is_static else tf.raw_ops.LookupTableImportV2
            put(table_handle=table._resource_handle, keys=content[0], values=content[1])

    return remake


def _create(owner: Any) -> None:
    """Make a new resource of the owner's, and give it the handle unless the old one says the same.

    The old handle is kept where it leads to the new resource: others hold it too.
    """
    with tf.device(owner._resource_device):
        handle = owner._create_resource()
    if _Resource.of(handle) != _Resource.of(owner._resource_handle):
        owner._resource_handle = handle
