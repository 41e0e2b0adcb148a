"""From whatever `fit` is given to one dataset per worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.dataset_creator import DatasetCreator
from kerasps.errors import InputError

# A function that travels to a worker holds the arrays, and TensorFlow's limit for a message is 2 GiB.
MAX_ARRAY_BYTES = 2**31 - 2**20


@dataclass(frozen=True)
class Execution:
    """Steps to do in one go: how many, and the header that carries the global number of the first."""

    num_steps: int
    header: np.ndarray


@dataclass
class WorkerIterator:
    """One worker's iterator, alive on that worker, with its resource and its spec.

    `remaining` is the number of batches left where the dataset knows it, None where it does not or never ends; `checked` says
    that the data ends at a point which only reading finds. `executions` are the functions that read it, by number of steps.
    `uncollected` are executions whose results the worker still holds, `collect_at` is when to fetch them, and `lost` says that
    they could not be fetched. `lock` is held while they are.
    """

    iterator: tf.data.Iterator
    remaining: int | None
    checked: bool
    resource: tf.Tensor = field(init=False)
    spec: tf.data.IteratorSpec = field(init=False)
    exhausted: bool = False
    executions: dict[int, Any] = field(default_factory=dict)
    uncollected: list[Execution] = field(default_factory=list)
    collect_at: float = 0.0
    lost: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        (self.resource,) = tf.nest.flatten(self.iterator, expand_composites=True)
        self.spec = tf.data.IteratorSpec(self.iterator.element_spec)

    @property
    def has_data(self) -> bool:
        """Whether there may be a batch left."""
        return not self.exhausted and self.remaining != 0

    def become(self, other: WorkerIterator) -> None:
        """Takes the place of one whose results were lost."""
        self.iterator, self.resource, self.spec, self.remaining = other.iterator, other.resource, other.spec, other.remaining
        self.exhausted = self.lost = False

    def take_uncollected(self) -> tuple[Execution, ...]:
        """Empties `uncollected` and returns what was in it."""
        taken = tuple(self.uncollected)
        self.uncollected.clear()
        return taken


class WorkerInput:
    """The datasets of all workers, made by one concrete function per worker.

    Args:
        make_dataset: from (worker, epoch as a tensor) to the worker's `tf.data.Dataset`; traced once per worker.
        num_workers: the number of workers.
    """

    def __init__(self, make_dataset: Callable[[int, tf.Tensor], tf.data.Dataset], num_workers: int) -> None:
        self._element_specs: list[Any] = [None] * num_workers
        self._functions = [self._trace(make_dataset, worker) for worker in range(num_workers)]
        self.consumed = [0] * num_workers
        self._epoch = 0
        self._must_end = False

    def _trace(self, make_dataset: Callable[[int, tf.Tensor], tf.data.Dataset], worker: int) -> Any:
        def dataset_of_worker(epoch: tf.Tensor) -> Any:
            dataset = make_dataset(worker, epoch).prefetch(tf.data.AUTOTUNE)
            self._element_specs[worker] = dataset.element_spec
            return dataset, dataset.cardinality()

        signature = [tf.TensorSpec([], tf.int64)]
        return tf.function(dataset_of_worker, autograph=False, input_signature=signature).get_concrete_function()

    @property
    def element_spec(self) -> Any:
        """The most specific `tf.TypeSpec` structure that fits the batches of all workers."""
        first, *others = self._element_specs

        def common(spec: Any, *rest: Any) -> Any:
            merged = spec.most_specific_common_supertype(list(rest))
            if merged is None:
                raise InputError(
                    "The workers' datasets must yield batches of one structure, dtype and rank. "
                    f"Received: {spec} on worker 0 and {rest} on the others. Make `dataset_fn` return the same on each worker."
                )
            return merged

        try:
            return tf.nest.map_structure(common, first, *others)
        except (TypeError, ValueError) as exc:
            if isinstance(exc, InputError):
                raise
            raise InputError(
                "The workers' datasets must yield batches of one structure. "
                f"Received: {self._element_specs}. Make `dataset_fn` return the same structure on each worker."
            ) from exc

    def start_epoch(self, epoch: int, *, must_end: bool) -> None:
        """New iterators start at the beginning of `epoch`; with `must_end`, data that never ends is an error."""
        self._epoch, self._must_end = epoch, must_end
        self.consumed = [0] * len(self._functions)

    def make_iterator(self) -> WorkerIterator:
        """A new iterator on the worker on which this is dispatched, behind the batches that it has consumed in this epoch."""
        worker = _compat.get_current_dispatch_context().worker_index
        dataset, cardinality = self._functions[worker](tf.constant(self._epoch, tf.int64))
        cardinality = int(cardinality)
        consumed = self.consumed[worker]
        if cardinality == tf.data.INFINITE_CARDINALITY:
            if self._must_end:
                raise InputError(
                    "The input never ends, so an epoch of it would not. Expected: `steps_per_epoch`, or a dataset that ends. "
                    "Received: steps_per_epoch=None and an infinite dataset. Pass `steps_per_epoch`, or drop `.repeat()`."
                )
            return WorkerIterator(iter(dataset), None, checked=False)
        if consumed:
            dataset = dataset.skip(consumed)
        if cardinality == tf.data.UNKNOWN_CARDINALITY:
            return WorkerIterator(iter(dataset), None, checked=True)
        return WorkerIterator(iter(dataset), cardinality - consumed, checked=False)


def worker_input(
    data: Any,
    num_workers: int,
    *,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Mapping[int, float] | None = None,
    batch_size: int | None = None,
    shuffle: bool | str = True,
) -> WorkerInput:
    """The `WorkerInput` of what `fit` was given; arguments as `keras.Model.fit` takes them.

    Raises:
        InputError: kerasps cannot split this kind of input over workers.
    """
    if isinstance(data, (DatasetCreator, tf.data.Dataset)):
        _reject_beside_dataset(data, y=y, sample_weight=sample_weight, batch_size=batch_size)
    if isinstance(data, DatasetCreator):
        make = _from_creator(data, num_workers)
    elif isinstance(data, tf.data.Dataset):
        make = _from_dataset(data, num_workers)
    elif isinstance(data, tf.distribute.DistributedDataset):
        raise InputError(
            "The dataset is distributed already, by a strategy. Expected: a plain `tf.data.Dataset`, which `fit` splits over "
            f"the workers itself. Received: {type(data).__name__}. Pass the dataset from before "
            "`experimental_distribute_dataset`."
        )
    elif isinstance(data, keras.utils.PyDataset) or hasattr(data, "__next__") or callable(data):
        raise InputError(
            "A generator, callable or `keras.utils.PyDataset` lives in this process, and no worker can read it. Expected: "
            "a `kerasps.DatasetCreator`, a `tf.data.Dataset`, or arrays. "
            f"Received: x of type {type(data).__name__}. Make the batches in a `DatasetCreator`."
        )
    else:
        if class_weight is not None:
            if sample_weight is not None:
                raise InputError("Give `class_weight` or `sample_weight`. Received: both.")
            sample_weight = _compat.class_weight_to_sample_weights(y, class_weight)
        return WorkerInput(_from_arrays((data, y, sample_weight), num_workers, batch_size or 32, bool(shuffle)), num_workers)
    if class_weight is None:
        return WorkerInput(make, num_workers)
    add_weights = _compat.make_class_weight_map_fn(class_weight)
    return WorkerInput(lambda worker, epoch: make(worker, epoch).map(add_weights), num_workers)


def _reject_beside_dataset(data: Any, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise InputError(
                f"Argument `{name}` does not go with x={data!r}, whose batches hold it. Expected: None. "
                f"Received: {name} of type {type(value).__name__}. Put it into the dataset."
            )


def _from_creator(creator: DatasetCreator, num_workers: int) -> Callable[[int, tf.Tensor], tf.data.Dataset]:
    def make(worker: int, epoch: tf.Tensor) -> tf.data.Dataset:
        del epoch
        return creator(tf.distribute.InputContext(num_workers, worker, num_replicas_in_sync=1))

    return make


def _from_dataset(dataset: tf.data.Dataset, num_workers: int) -> Callable[[int, tf.Tensor], tf.data.Dataset]:
    # A dataset lives on the coordinator; what travels is its graph, with the shard that the worker reads.
    graphs = [_compat.serialize_dataset_to_graph(dataset.shard(num_workers, worker)) for worker in range(num_workers)]
    cardinality = int(dataset.cardinality())

    def make(worker: int, epoch: tf.Tensor) -> tf.data.Dataset:
        del epoch
        shard = _compat.deserialize_dataset_from_graph(graphs[worker], dataset.element_spec)
        if cardinality >= 0:  # a dataset that was sent as a graph no longer knows
            shard = shard.apply(tf.data.experimental.assert_cardinality(len(range(worker, cardinality, num_workers))))
        elif cardinality == tf.data.INFINITE_CARDINALITY:
            shard = shard.apply(tf.data.experimental.assert_cardinality(cardinality))
        return shard

    return make


def _from_arrays(
    arrays: tuple[Any, Any, Any], num_workers: int, batch_size: int, shuffle: bool
) -> Callable[[int, tf.Tensor], tf.data.Dataset]:
    x, y, sample_weight = keras.tree.map_structure(_as_array, arrays)
    batch = x if y is None and sample_weight is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    lengths = {len(array) for array in tf.nest.flatten(batch)}
    if len(lengths) != 1:
        raise InputError(
            "Arrays given to `fit` must have the same length. "
            f"Received: lengths {[len(a) for a in tf.nest.flatten(batch)]} in x, y, sample_weight."
        )
    (length,) = lengths
    num_bytes = sum(getattr(array, "nbytes", 0) for array in tf.nest.flatten(batch))
    if length == 0 or num_bytes >= MAX_ARRAY_BYTES:
        raise InputError(
            "Arrays given to `fit` are sent to each worker as a whole. Expected: at least one example, and less than 2 GiB, "
            f"which is TensorFlow's limit. Received: {length} examples, {num_bytes:,} bytes. Read larger data in a "
            "`kerasps.DatasetCreator`."
        )
    seed = int(keras.random.randint((), 0, 2**31 - 1)) if shuffle else 0

    def make(worker: int, epoch: tf.Tensor) -> tf.data.Dataset:
        # Every worker works out the same order of the epoch and takes its share of the batches.
        def place(index: tf.Tensor) -> tf.Tensor:
            key = tf.stack([tf.constant(seed, tf.int64), epoch])
            return tf.random.experimental.index_shuffle(index, key, tf.constant(length - 1, tf.int64))

        indices = tf.data.Dataset.range(length)
        if shuffle:
            indices = indices.map(place)
        indices = indices.batch(batch_size).shard(num_workers, worker)
        return indices.map(lambda index: tf.nest.map_structure(lambda array: tf.gather(array, index), batch))

    return make


def _as_array(value: Any) -> Any:
    if value is None or isinstance(value, (tf.Tensor, tf.RaggedTensor)):
        return value
    array = value.to_numpy() if hasattr(value, "to_numpy") else np.asarray(value)
    if array.dtype == object:
        try:
            return np.asarray(array.tolist())
        except ValueError as exc:
            raise InputError(
                "An array given to `fit` must be rectangular and of one dtype. "
                f"Received: an array of objects of shape {array.shape}."
            ) from exc
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array
