"""Makes an `Input` of the data passed to `fit`, `evaluate` and `predict`."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Mapping
from typing import Any, TypedDict

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.errors import InputError
from kerasps.inputs.arguments import check_array, check_arrays, is_of_strings
from kerasps.inputs.array_batches import with_gathered_batches
from kerasps.inputs.class_weights import sample_weights, weighing
from kerasps.inputs.dataset_creator import DatasetCreator
from kerasps.inputs.dataset_graphs import (
    LivesHereError,
    as_graph,
    dataset_graph,
    endless_input,
    python_calls,
)
from kerasps.inputs.dataset_order import OrderedGraph, random_choices
from kerasps.inputs.fed_input import FedInput
from kerasps.inputs.pass_order import SeededOrder
from kerasps.inputs.repeated import one_pass
from kerasps.inputs.source import Input
from kerasps.inputs.worker_input import MakeDataset, WorkerInput

_LOGGER = logging.getLogger("kerasps")

# A function that is sent to a worker contains the arrays, and TensorFlow's limit for a message is
# 2 GiB.
MAX_ARRAY_BYTES = 2**31 - 2**20


class InputArguments(TypedDict, total=False):
    """The arguments of `as_input` except the data and the number of workers."""

    y: object
    sample_weight: object
    class_weight: Mapping[int, float] | None
    batch_size: int | None
    shuffle: bool | str
    steps: int | None
    goes_on: bool
    in_order: bool


def as_input(
    data: object,
    num_workers: int,
    *,
    y: object = None,
    sample_weight: object = None,
    class_weight: Mapping[int, float] | None = None,
    batch_size: int | None = None,
    shuffle: bool | str = False,
    steps: int | None = None,
    goes_on: bool = False,
    in_order: bool = False,
    in_passes: bool = False,
) -> Input:
    """Return the `Input` of the arguments of a model's method, as `keras.Model.fit` takes them.

    Args:
        steps: the number of batches to use; None for one pass. They are the first batches, except
            for a `DatasetCreator` in training or evaluation, whose batches have no order.
        goes_on: whether the next `steps` continue where these ended, so that the input must not be
            truncated.
        in_order: whether to number the batches as one process would read them. A `DatasetCreator`
            then makes one dataset, and worker `w` takes each batch `i` with
            `i % num_workers == w`.
        in_passes: whether to return one pass of data that repeat, where their graph shows it.
    """
    _reject_distributed(data)
    limit = None if goes_on else steps
    if isinstance(data, DatasetCreator):
        _reject_beside_dataset(data, y=y, sample_weight=sample_weight, batch_size=batch_size)
        return _from_creator(
            data, num_workers, class_weight, steps, goes_on=goes_on, in_order=in_order
        )
    if isinstance(data, tf.data.Dataset):
        # A `batch_size` is ignored, as in Keras's adapter for a dataset.
        _reject_beside_dataset(data, y=y, sample_weight=sample_weight)
        if steps is None and int(data.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise endless_input()
        dataset = _weighted(data if limit is None else data.take(limit), class_weight)
        return _from_whole(data, dataset, num_workers, in_passes=in_passes)
    if (
        isinstance(data, keras.utils.PyDataset)
        or hasattr(data, "__next__")
        or _is_foreign_loader(data)
    ):
        return _from_adapter(data, y, sample_weight, class_weight, shuffle)
    if callable(data):
        raise InputError(
            "A function is not an input. Expected: a `kerasps.DatasetCreator`, a "
            "`tf.data.Dataset`, arrays, a `keras.utils.PyDataset` or a generator. Received: x of "
            f"type {type(data).__name__}. Call it, or wrap it: "
            "`kerasps.DatasetCreator(dataset_fn)`."
        )
    weights = _array_weights(y, sample_weight, class_weight)
    return _from_arrays((data, y, weights), num_workers, batch_size, bool(shuffle), steps, limit)


def _reject_distributed(data: object) -> None:
    if isinstance(data, (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)):
        raise InputError(
            "The dataset is distributed already, by a strategy. Expected: a plain "
            "`tf.data.Dataset`, which kerasps splits over the workers. Received: "
            f"{type(data).__name__}. Pass the dataset that you passed to "
            "`experimental_distribute_dataset`."
        )


def _reject_beside_dataset(data: object, **arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise InputError(
                f"Argument `{name}` does not go with x={data!r}, whose batches contain it. "
                f"Expected: None. Received: {name} of type {type(value).__name__}. Put it into the "
                "dataset."
            )


@functools.cache
def _tell_of_endless_data() -> None:
    """Log, once in a process, that workers read endless data at different rates."""
    _LOGGER.warning(
        "The dataset never ends, so each worker reads a part of it at its pace: examples in the "
        "part of a slower worker are seen less often. To see each example once in an epoch, leave "
        "out `.repeat()` and `steps_per_epoch`."
    )


def _reject_empty(num_batches: int | None, data: object) -> None:
    if num_batches == 0:
        raise InputError(
            "The input is empty. Expected: at least one batch. Received: x of type "
            f"{type(data).__name__} without any. Check the code that selects the examples."
        )


# Datasets


def _weighted(
    dataset: tf.data.Dataset, class_weight: Mapping[int, float] | None
) -> tf.data.Dataset:
    return dataset if class_weight is None else dataset.map(weighing(class_weight))


def _from_creator(
    data: DatasetCreator,
    num_workers: int,
    class_weight: Mapping[int, float] | None,
    steps: int | None,
    *,
    goes_on: bool,
    in_order: bool,
) -> Input:
    limit = None if goes_on else steps
    make = _shared_creator(data, num_workers, limit) if in_order else _creator(data, num_workers)
    worker_input = WorkerInput(
        lambda *given: _weighted(make(*given), class_weight), num_workers, is_whole=in_order
    )
    worker_input.reject_python_calls()
    if steps is None and worker_input.never_ends:
        raise endless_input()
    if in_order and worker_input.leaves_order_open:
        # Made once, in this process: its graph is sent to all workers, with one order.
        dataset = data(tf.distribute.InputContext(1, 0, num_replicas_in_sync=1))
        return _from_whole(data, dataset if limit is None else dataset.take(limit), num_workers)
    return worker_input


def _from_whole(
    given: object, dataset: tf.data.Dataset, num_workers: int, *, in_passes: bool = False
) -> Input:
    """Return the input of a dataset that all workers read; each keeps its split of the batches."""
    cardinality = int(dataset.cardinality())
    num_batches = cardinality if cardinality >= 0 else None
    _reject_empty(num_batches, given)
    try:
        graph_def = dataset_graph(dataset)
    except LivesHereError:
        _warn_of_feeding("The dataset uses a table, or an iterator, without a name")
        return FedInput(dataset, num_batches=num_batches)
    if python_calls(graph_def):
        _warn_of_feeding(
            "The dataset calls Python functions of this process (`from_generator`, `py_function`)"
        )
        return FedInput(dataset, num_batches=num_batches)
    choices = random_choices(graph_def)
    if choices:
        _warn_of_feeding(
            f"The dataset draws numbers at random by which {', '.join(choices)} decides on "
            "examples, so two workers that read it would get different ones"
        )
        return FedInput(dataset, num_batches=num_batches)
    begins_again = False
    if cardinality == tf.data.INFINITE_CARDINALITY and num_workers > 1:
        single = one_pass(graph_def, num_workers) if in_passes else None
        if single is None:
            _tell_of_endless_data()
        else:
            begins_again = True
            graph_def, cardinality = single
            num_batches = cardinality if cardinality >= 0 else None
    graph = OrderedGraph(with_gathered_batches(graph_def), given)

    make_whole = as_graph(dataset.element_spec, cardinality, lambda key: graph.fill(*key))

    def make(worker: int, seeds: tf.Tensor, mark: tf.Tensor) -> tf.data.Dataset:
        return make_whole((seeds, mark)).shard(num_workers, worker)

    return WorkerInput(
        make,
        num_workers,
        num_batches=num_batches,
        order=graph,
        begins_again=begins_again,
    )


def _creator(creator: DatasetCreator, num_workers: int) -> MakeDataset:
    def make(worker: int, epoch: tf.Tensor, mark: tf.Tensor) -> tf.data.Dataset:
        del epoch, mark
        return creator(tf.distribute.InputContext(num_workers, worker, num_replicas_in_sync=1))

    return make


def _shared_creator(creator: DatasetCreator, num_workers: int, limit: int | None) -> MakeDataset:
    def make(worker: int, epoch: tf.Tensor, mark: tf.Tensor) -> tf.data.Dataset:
        del epoch, mark
        dataset = creator(tf.distribute.InputContext(1, 0, num_replicas_in_sync=1))
        return (dataset if limit is None else dataset.take(limit)).shard(num_workers, worker)

    return make


# Data that this process reads


def _is_foreign_loader(data: object) -> bool:
    """Return whether `data` is a loader of PyTorch or Grain, which Keras accepts too."""
    return bool(
        _compat.data_adapters.is_torch_dataloader(data)
        or _compat.data_adapters.is_grain_dataset(data)
    )


def _from_adapter(
    data: object, y: object, sample_weight: object, class_weight: object, shuffle: object
) -> FedInput:
    with warnings.catch_warnings():
        # `shuffle` is True by default in `fit`. Keras warns that it does not shuffle a generator
        # only if the user passed the argument.
        warnings.filterwarnings("ignore", message="`shuffle=True` was passed")
        adapter = _compat.data_adapters.get_data_adapter(
            data, y, sample_weight=sample_weight, class_weight=class_weight, shuffle=bool(shuffle)
        )
    _reject_empty(adapter.num_batches, data)
    _warn_of_feeding(f"x, of type {type(data).__name__}, lives in this process")
    reads_once = hasattr(data, "__next__")
    return FedInput(
        adapter.get_tf_dataset(),
        num_batches=adapter.num_batches,
        adapter=adapter,
        reads_once=reads_once,
    )


def _warn_of_feeding(why: str) -> None:
    warnings.warn(
        f"{why}: this process reads every batch and sends it to a worker, so reading does not get "
        "faster with more workers, and the data pass through this machine's network. To read on "
        "the workers, use a `kerasps.DatasetCreator`.",
        stacklevel=2,
    )


# Arrays


def _array_weights(
    y: object, sample_weight: object, class_weight: Mapping[int, float] | None
) -> object:
    """Return the weights of the examples in arrays, None if neither kind is given."""
    if class_weight is None:
        return sample_weight
    if sample_weight is not None:
        raise InputError(
            "`class_weight` does not go with `sample_weight`. Expected: one of them. Received: "
            "both. Leave out one of the two."
        )
    if y is None:
        raise InputError(
            "`class_weight` gives examples weights by their y. Expected: y. Received: y=None. Pass "
            "y, or use `sample_weight`."
        )
    return sample_weights(y, class_weight)


def _from_arrays(
    arrays: tuple[object, object, object],
    num_workers: int,
    batch_size: int | None,
    shuffle: bool,
    steps: int | None,
    limit: int | None,
) -> WorkerInput:
    check_arrays(x=arrays[0], y=arrays[1], sample_weight=arrays[2])
    x, y, sample_weight = keras.tree.map_structure(_as_array, arrays)
    # A dataset treats a list as one tensor, and a tuple as several.
    batch = keras.tree.lists_to_tuples(keras.utils.pack_x_y_sample_weight(x, y, sample_weight))
    leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
    lengths = [int(leaf.shape[0]) if len(leaf.shape) else 0 for leaf in leaves]
    if len(set(lengths)) != 1:
        raise InputError(
            "Arrays must have the same length, which is the number of examples. "
            f"Received: lengths {lengths} in x, y, sample_weight."
        )
    length = lengths[0]
    num_bytes = sum(getattr(array, "nbytes", 0) for array in leaves)
    if length == 0:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
        raise InputError(
            "The input is empty. Expected: at least one example. Received: arrays of shape "
            f"{shapes}. Check the code that selects the examples."
        )
    if num_bytes >= MAX_ARRAY_BYTES:
        raise InputError(
            "The arrays are too large: each worker gets all of them. Expected: less than 2 GiB, "
            f"which is TensorFlow's limit. Received: {length} examples, {num_bytes:,} bytes. Read "
            "larger data in a `kerasps.DatasetCreator`."
        )
    # As in Keras, steps without a batch size divide the examples.
    batch_size = batch_size or (-(-length // steps) if steps else 32)
    num_batches = -(-length // batch_size)
    num_batches = num_batches if limit is None else min(limit, num_batches)

    def make(worker: int, key: tf.Tensor, mark: tf.Tensor) -> tf.data.Dataset:
        del mark

        # Every worker computes the same order of the epoch, and takes its split of the batches.
        def rows_of(number: tf.Tensor) -> Any:
            begin = number * batch_size
            index = tf.range(begin, tf.minimum(begin + batch_size, length))
            if shuffle:
                # For a batch at a time: one by one it would take longer than a small step.
                last = tf.constant(length - 1, tf.int64)
                index = tf.random.experimental.index_shuffle(index, key, last)
            return keras.tree.map_structure(lambda array: _rows(array, index), batch)

        return tf.data.Dataset.range(num_batches).shard(num_workers, worker).map(rows_of)

    return WorkerInput(make, num_workers, num_batches=num_batches, order=SeededOrder(shuffle))


def _rows(array: object, index: tf.Tensor) -> Any:
    if array is None:
        return None
    if not isinstance(array, tf.SparseTensor):
        return tf.gather(array, index)
    # Convert to a ragged tensor of entries per row, whose rows can be gathered.
    splits = tf.RaggedTensor.from_value_rowids(
        tf.range(tf.size(array.values)), array.indices[:, 0], array.dense_shape[0]
    )
    entries = tf.gather(splits, index)
    inner = tf.gather(array.indices[:, 1:], entries.values)
    indices = tf.concat([tf.cast(entries.value_rowids(), tf.int64)[:, None], inner], 1)
    # A layer reads the number of columns when the step is traced, so it must be constant.
    shape = tf.concat(
        [tf.size(index, tf.int64)[None], tf.constant(array.shape[1:].as_list(), tf.int64)], 0
    )
    return tf.SparseTensor(indices, tf.gather(array.values, entries.values), shape)


def _as_array(value: Any) -> Any:
    if value is None or isinstance(value, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return value
    if hasattr(value, "tocoo"):  # a sparse matrix of SciPy
        value = value.tocoo()
        indices = np.stack([value.row, value.col], axis=1).astype(np.int64)
        return tf.sparse.reorder(tf.SparseTensor(indices, _in_floatx(value.data), value.shape))
    array = value.to_numpy() if hasattr(value, "to_numpy") else np.asarray(value)
    if array.dtype == object:
        given = array
        with contextlib.suppress(ValueError):  # rows of different lengths
            array = np.asarray(array.tolist())
        # NumPy converts missing values among strings to strings.
        if array.dtype.kind in "US" and not is_of_strings(given):
            array = given
    check_array(array)
    return _in_floatx(array)


def _in_floatx(array: np.ndarray) -> np.ndarray:
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array
