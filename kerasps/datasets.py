"""From whatever `fit`, `evaluate` and `predict` are given to an `Input`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.dataset_creator import DatasetCreator
from kerasps.errors import InputError
from kerasps.inputs import FedInput, Input, WorkerInput, as_graph, dataset_graph, python_calls

# A function that travels to a worker holds the arrays, and TensorFlow's limit for a message is 2 GiB.
MAX_ARRAY_BYTES = 2**31 - 2**20

# From (worker, epoch as a tensor) to the worker's dataset.
_MakeDataset = Callable[[int, tf.Tensor], tf.data.Dataset]


def make_input(
    data: Any,
    num_workers: int,
    *,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    batch_size: int | None = None,
    shuffle: bool | str = False,
    limit: int | None = None,
    in_order: bool = False,
) -> Input:
    """The `Input` of what a method of a model was given; arguments as `keras.Model.fit` takes them.

    Args:
        limit: use no more than so many batches of the input; a `DatasetCreator` for training or evaluation has no order, and so
            no first ones.
        in_order: number the batches as one process would read them. A `DatasetCreator` then makes one dataset, of which each
            worker takes every so-manieth batch.

    Raises:
        InputError: kerasps cannot read this kind of input.
    """
    if isinstance(data, (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)):
        raise InputError(
            "The dataset is distributed already, by a strategy. Expected: a plain `tf.data.Dataset`, which is split over "
            f"the workers here. Received: {type(data).__name__}. Pass the dataset as it was before "
            "`experimental_distribute_dataset`."
        )
    if isinstance(data, (DatasetCreator, tf.data.Dataset)):
        _reject_beside_dataset(data, y=y, sample_weight=sample_weight, batch_size=batch_size)
        return _from_datasets(data, num_workers, class_weight, limit, in_order)
    if isinstance(data, keras.utils.PyDataset) or hasattr(data, "__next__") or _is_foreign_loader(data):
        return _from_adapter(data, y, sample_weight, class_weight, shuffle)
    if callable(data):
        raise InputError(
            "A function is not an input. Expected: a `kerasps.DatasetCreator`, a `tf.data.Dataset`, arrays, a "
            f"`keras.utils.PyDataset` or a generator. Received: x of type {type(data).__name__}. Call it, or wrap it: "
            "`kerasps.DatasetCreator(dataset_fn)`."
        )
    if class_weight is not None:
        if sample_weight is not None:
            raise InputError("Give `class_weight` or `sample_weight`. Received: both.")
        sample_weight = _compat.class_weight_to_sample_weights(y, class_weight)
    return _from_arrays((data, y, sample_weight), num_workers, batch_size or 32, bool(shuffle), limit)


def _reject_beside_dataset(data: Any, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise InputError(
                f"Argument `{name}` does not go with x={data!r}, whose batches hold it. Expected: None. "
                f"Received: {name} of type {type(value).__name__}. Put it into the dataset."
            )


# Datasets


def _from_datasets(
    data: Any, num_workers: int, class_weight: Mapping[int, float] | None, limit: int | None, in_order: bool
) -> Input:
    def weighted(dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset if class_weight is None else dataset.map(_compat.make_class_weight_map_fn(class_weight))

    if isinstance(data, DatasetCreator):
        make = _shared_creator(data, num_workers, limit) if in_order else _creator(data, num_workers)
        worker_input = WorkerInput(lambda worker, epoch: weighted(make(worker, epoch)), num_workers)
        worker_input.reject_python_calls()
        return worker_input
    data = weighted(data if limit is None else data.take(limit))
    cardinality = int(data.cardinality())
    num_batches = cardinality if cardinality >= 0 else None
    if python_calls(dataset_graph(data)):
        _warn_of_feeding("The dataset calls Python functions of this process (`from_generator`, `py_function`)")
        return FedInput(data, num_batches=num_batches)
    shards = [as_graph(data.shard(num_workers, worker)) for worker in range(num_workers)]
    return WorkerInput(lambda worker, epoch: shards[worker](), num_workers, num_batches=num_batches)


def _creator(creator: DatasetCreator, num_workers: int) -> _MakeDataset:
    def make(worker: int, epoch: tf.Tensor) -> tf.data.Dataset:
        del epoch
        return creator(tf.distribute.InputContext(num_workers, worker, num_replicas_in_sync=1))

    return make


def _shared_creator(creator: DatasetCreator, num_workers: int, limit: int | None) -> _MakeDataset:
    def make(worker: int, epoch: tf.Tensor) -> tf.data.Dataset:
        del epoch
        dataset = creator(tf.distribute.InputContext(1, 0, num_replicas_in_sync=1))
        return (dataset if limit is None else dataset.take(limit)).shard(num_workers, worker)

    return make


# What this process reads


def _is_foreign_loader(data: Any) -> bool:
    """Whether `data` is a loader of PyTorch or Grain, which Keras takes too."""
    return bool(_compat.data_adapters.is_torch_dataloader(data) or _compat.data_adapters.is_grain_dataset(data))


def _from_adapter(data: Any, y: Any, sample_weight: Any, class_weight: Any, shuffle: Any) -> FedInput:
    with warnings.catch_warnings():
        # `fit` shuffles by default; Keras warns that it does not shuffle a generator only where that was asked for.
        warnings.filterwarnings("ignore", message="`shuffle=True` was passed")
        adapter = _compat.data_adapters.get_data_adapter(
            data, y, sample_weight=sample_weight, class_weight=class_weight, shuffle=bool(shuffle)
        )
    _warn_of_feeding(f"x, of type {type(data).__name__}, lives in this process")
    return FedInput(adapter.get_tf_dataset(), num_batches=adapter.num_batches, adapter=adapter)


def _warn_of_feeding(why: str) -> None:
    warnings.warn(
        f"{why}: every batch is read here and sent to a worker, so reading does not get faster with more workers, and the data "
        "pass through this machine's network. To read on the workers, use a `kerasps.DatasetCreator`.",
        stacklevel=2,
    )


# Arrays


def _from_arrays(
    arrays: tuple[Any, Any, Any], num_workers: int, batch_size: int, shuffle: bool, limit: int | None
) -> WorkerInput:
    x, y, sample_weight = keras.tree.map_structure(_as_array, arrays)
    # To a dataset a list is a tensor.
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
    if length == 0 or num_bytes >= MAX_ARRAY_BYTES:
        raise InputError(
            "Arrays are sent to each worker as a whole. Expected: at least one example, and less than 2 GiB, "
            f"which is TensorFlow's limit. Received: {length} examples, {num_bytes:,} bytes. Read larger data in a "
            "`kerasps.DatasetCreator`."
        )
    num_batches = -(-length // batch_size)
    num_batches = num_batches if limit is None else min(limit, num_batches)
    seed = int(keras.random.randint((), 0, 2**31 - 1)) if shuffle else 0

    def make(worker: int, epoch: tf.Tensor) -> tf.data.Dataset:
        # Every worker works out the same order of the epoch and takes its share of the batches.
        def place(index: tf.Tensor) -> tf.Tensor:
            key = tf.stack([tf.constant(seed, tf.int64), epoch])
            return tf.random.experimental.index_shuffle(index, key, tf.constant(length - 1, tf.int64))

        indices = tf.data.Dataset.range(length)
        if shuffle:
            indices = indices.map(place)
        indices = indices.batch(batch_size).take(num_batches).shard(num_workers, worker)
        return indices.map(lambda index: keras.tree.map_structure(lambda array: _rows(array, index), batch))

    return WorkerInput(make, num_workers, num_batches=num_batches)


def _rows(array: Any, index: tf.Tensor) -> Any:
    if array is None:
        return None
    if not isinstance(array, tf.SparseTensor):
        return tf.gather(array, index)
    # As a ragged tensor of entries per row, whose rows can be gathered.
    splits = tf.RaggedTensor.from_value_rowids(tf.range(tf.size(array.values)), array.indices[:, 0], array.dense_shape[0])
    entries = tf.gather(splits, index)
    inner = tf.gather(array.indices[:, 1:], entries.values)
    indices = tf.concat([tf.cast(entries.value_rowids(), tf.int64)[:, None], inner], 1)
    # A layer asks for the number of columns when the step is traced, so they are constants.
    shape = tf.concat([tf.size(index, tf.int64)[None], tf.constant(array.shape[1:].as_list(), tf.int64)], 0)
    return tf.SparseTensor(indices, tf.gather(array.values, entries.values), shape)


def _as_array(value: Any) -> Any:
    if value is None or isinstance(value, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)):
        return value
    if hasattr(value, "tocoo"):  # of SciPy
        value = value.tocoo()
        indices = np.stack([value.row, value.col], axis=1).astype(np.int64)
        return tf.sparse.reorder(tf.SparseTensor(indices, _in_floatx(value.data), value.shape))
    array = value.to_numpy() if hasattr(value, "to_numpy") else np.asarray(value)
    if array.dtype == object:
        try:
            return np.asarray(array.tolist())
        except ValueError as exc:
            raise InputError(
                "An array given to `fit` must be rectangular and of one dtype. "
                f"Received: an array of objects of shape {array.shape}."
            ) from exc
    return _in_floatx(array)


def _in_floatx(array: np.ndarray) -> np.ndarray:
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array
