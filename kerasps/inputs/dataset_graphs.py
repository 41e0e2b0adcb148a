"""Turns datasets into graphs, which can be sent to a worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from kerasps.errors import InputError


def endless_input() -> InputError:
    """Return the error for data that never end if one pass over them was requested."""
    return InputError(
        "The input never ends, so an epoch of it would not. Expected: `steps_per_epoch`, or a "
        "dataset that ends (`evaluate` and `predict`: `steps`; `validation_data`: "
        "`validation_steps`). Received: none of them, and an infinite dataset. Pass "
        "`steps_per_epoch`, or drop `.repeat()`."
    )


class LivesHereError(InputError):
    """Raised if a dataset uses an object that only this process has and that cannot be sent."""


# TensorFlow's `ExternalStatePolicy.WARN`: tables and files stay out of the graph, with a warning.
_WARN_OF_STATE = 0


def dataset_graph(dataset: tf.data.Dataset) -> Any:
    """Return the `GraphDef` that makes the dataset, without the devices it was made on.

    Raises:
        LivesHereError: it uses an object without a name, such as an anonymous table.
    """
    try:
        serialized = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=_WARN_OF_STATE,
            strip_device_assignment=True,
        )
    except tf.errors.FailedPreconditionError as exc:
        raise LivesHereError(
            "The dataset uses an object that lives in this process, where the workers cannot reach "
            "it. Expected: datasets whose functions use variables, layers and tables with names. "
            f"Received: {exc.message.partition(' [Op:')[0]} Make tables without "
            "`experimental_is_anonymous`, or pass the dataset itself instead of a "
            "`DatasetCreator`: then this process reads it, and sends its batches to the workers."
        ) from exc
    return tf.compat.v1.GraphDef.FromString(serialized.numpy())


def python_calls(graph_def: tf.compat.v1.GraphDef) -> list[str]:
    """Return the kinds of operations in a `GraphDef` that call Python functions.

    Only this process can call these functions.
    """
    return sorted({node.op for node in _nodes(graph_def) if "PyFunc" in node.op})


def has_loops(graph_def: tf.compat.v1.GraphDef) -> bool:
    """Return whether a `GraphDef` has a `tf.while_loop`, in any of its functions."""
    return any(node.op in ("While", "StatelessWhile") for node in _nodes(graph_def))


def _nodes(graph_def: tf.compat.v1.GraphDef) -> Iterator[Any]:
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


def name_of(source: str) -> str:
    """Return the name of the node that an input comes from."""
    return source.lstrip("^").split(":")[0]


def upstream(nodes: Iterable[tf.compat.v1.NodeDef], names: Iterable[str]) -> set[str]:
    """Return `names`, and the names of all nodes that they depend on."""
    inputs = {node.name: [name_of(source) for source in node.input] for node in nodes}
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += inputs[name]
    return found


def reject_python_calls(graph_def: tf.compat.v1.GraphDef) -> None:
    """Raise `InputError` if the graph of a `dataset_fn` calls Python functions."""
    calls = python_calls(graph_def)
    if not calls:
        return
    raise InputError(
        "The dataset that `dataset_fn` returned calls Python functions (`from_generator`, "
        "`py_function`, `numpy_function`), which live in this process, where the workers cannot "
        f"reach them. Expected: a pipeline of TensorFlow operations. Received: {', '.join(calls)}. "
        "Write it with TensorFlow operations, or pass the dataset itself instead of a "
        "`DatasetCreator`: then this process reads it, and sends its batches to the workers."
    )


def as_graph(
    element_spec: object, cardinality: int, fill: Callable[[Any], tf.Tensor]
) -> Callable[[Any], tf.data.Dataset]:
    """Return a function that makes a dataset in any graph, also on another task.

    A dataset stays on the task where it was made; its graph can be sent.

    Args:
        cardinality: the number of its elements, as `tf.data.Dataset.cardinality` returns it.
        fill: returns its serialized graph, given the key of a pass, or what else a caller has.
    """

    def make(key: tf.Tensor | tuple[tf.Tensor, tf.Tensor]) -> tf.data.Dataset:
        variant = tf.raw_ops.DatasetFromGraph(graph_def=fill(key))
        copy = tf.data.experimental.from_variant(variant, element_spec)
        if cardinality == tf.data.UNKNOWN_CARDINALITY:
            return copy
        # The graph does not contain the length.
        return copy.apply(tf.data.experimental.assert_cardinality(cardinality))

    return make


def options_of(dataset: tf.data.Dataset) -> tf.data.Options:
    """Return the dataset's options, without TensorFlow's warning about graphs."""
    with warnings.catch_warnings():
        # In a graph, TensorFlow knows only the options that Python code set, and warns about that.
        warnings.filterwarnings("ignore", message="To make it possible to preserve tf.data options")
        return dataset.options()


@tf.autograph.experimental.do_not_convert
def quickly_deleted(dataset: tf.data.Dataset) -> Any:
    """Turn off tf.data's tuning, unless the dataset's options turn it on.

    Return an object that is not a `tf.data.Dataset`, such as a distributed one, unchanged.

    The thread that tunes an iterator wakes up at growing intervals, up to a minute. Deleting the
    iterator may wait for that, and with it everything that is sent to its task afterwards. On an
    idle machine the thread is notified in time; on a busy one, every other time it is not. Without
    tuning, AUTOTUNE means a thread per core.
    """
    if isinstance(dataset, tf.data.Dataset) and options_of(dataset).autotune.enabled is None:
        options = tf.data.Options()
        options.autotune.enabled = False
        dataset = dataset.with_options(options)
    return dataset


def makes_quickly_deleted(dataset_fn: Callable[..., object]) -> Callable[..., Any]:
    """Return a function whose dataset is that of `dataset_fn`, `quickly_deleted`."""

    def make(*args: object) -> Any:
        return quickly_deleted(dataset_fn(*args))

    return make


def per_worker_dataset(dataset_or_fn: object) -> Any:
    """Return an argument for `create_per_worker_dataset` whose iterators are quickly deleted.

    Args:
        dataset_or_fn: a dataset, or a function that makes one. A function that was traced already
            is not changed: its result is a tensor, which does not show its options.
    """
    if isinstance(dataset_or_fn, tf.types.experimental.ConcreteFunction):
        return dataset_or_fn
    if isinstance(dataset_or_fn, tf.types.experimental.PolymorphicFunction):
        return tf.function(makes_quickly_deleted(dataset_or_fn.python_function))
    if callable(dataset_or_fn):
        return makes_quickly_deleted(dataset_or_fn)
    return quickly_deleted(dataset_or_fn)
