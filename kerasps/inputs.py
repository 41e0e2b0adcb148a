"""Where the batches of an execution come from: a dataset on each worker, or this process, which sends them along."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps.dataset_order import leaves_order_open
from kerasps.errors import InputError
from kerasps.fetch import fetch
from kerasps.lookup_tables import LookupTables
from kerasps.storage import call_with


@dataclass(frozen=True)
class Execution:
    """Steps to do in one go: how many, and the header that carries the global number of the first.

    `batches` are those to do them on, where this process reads the data, and `first_batch` is the place of the first in the
    input; else the worker that takes the execution reads them itself.
    """

    num_steps: int
    header: np.ndarray
    batches: list[Any] | None = None
    first_batch: int = 0


@dataclass
class WorkerSource:
    """What one worker reads from: an iterator that is alive on that worker, with its resource and its spec, or nothing.

    `part` is which part of the input it reads. `remaining` is the number of batches left where the dataset knows it, None where
    it does not or never ends; `checked` says that the data ends at a point which only reading finds. `executions` are the
    functions that read it, by number of steps. `uncollected` are executions whose results the worker still holds, `collect_at`
    is when to fetch them, and `lost` says that they could not be fetched. `lock` is held while they are.
    """

    iterator: tf.data.Iterator | None
    part: int | None = None
    remaining: int | None = None
    checked: bool = False
    resource: tf.Tensor | None = None
    spec: tf.data.IteratorSpec | None = None
    exhausted: bool = False
    executions: dict[int, Any] = field(default_factory=dict)
    uncollected: list[Execution] = field(default_factory=list)
    collect_at: float = 0.0
    lost: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.iterator is not None:
            (self.resource,) = tf.nest.flatten(self.iterator, expand_composites=True)
            self.spec = tf.data.IteratorSpec(self.iterator.element_spec)

    @property
    def has_data(self) -> bool:
        """Whether there may be a batch left."""
        return not self.exhausted and self.remaining != 0

    def become(self, other: WorkerSource) -> None:
        """Takes the place of one that has ended, or whose results were lost."""
        self.iterator, self.resource, self.spec = other.iterator, other.resource, other.spec
        self.part, self.remaining, self.checked = other.part, other.remaining, other.checked
        self.exhausted = self.lost = False
        self.executions.clear()

    def take_uncollected(self) -> tuple[Execution, ...]:
        """Empties `uncollected` and returns what was in it."""
        taken = tuple(self.uncollected)
        self.uncollected.clear()
        return taken


class Input(Protocol):
    """What a loop over the data and its dispatcher need to know of an input."""

    num_batches: int | None
    # Whether batches travel with executions.
    sends_batches: bool
    # Whether there is one pass over the data, and no second.
    reads_once: bool

    @property
    def element_spec(self) -> Any:
        """The `tf.TypeSpec` structure that fits all batches."""

    @property
    def differences(self) -> str | None:
        """In words, what batches workers get, where these have not the same shapes; else None."""

    @property
    def all_read(self) -> bool:
        """Whether the workers have read every part of the input to its end."""

    def start_pass(self, epoch: int, *, must_end: bool) -> None:
        """What is read from here on starts at the beginning of `epoch`; with `must_end`, data that never ends is an error."""

    def take(self, num_steps: int) -> tuple[int, list[Any] | None, int]:
        """For the next execution: its steps, fewer than `num_steps` where the data are known to end, and, where batches travel,
        the batches and the place of the first."""

    def make_source(self) -> WorkerSource:
        """A source for the worker on which this is dispatched; one without data where there is no part for it."""

    def count(self, part: int | None, steps: int) -> int:
        """Takes note that steps of `part` are done; returns the place in the input of the first of them, in its part."""

    def finish(self, part: int | None) -> None:
        """Takes note that `part` was read to its end."""

    def release(self, part: int | None) -> None:
        """Takes note that the worker which read `part` is lost: any other may go on where it was."""

    @property
    def has_released(self) -> bool:
        """Whether there is a part that a worker without data can take."""

    def on_epoch_begin(self) -> None:
        """An epoch begins."""

    def on_epoch_end(self) -> None:
        """An epoch has ended."""


# Operations after which a dataset ends where it did before; beside those that map, batch and shuffle.
_KEEP_LENGTH = ("Identity", "OptionsDataset", "PrefetchDataset", "ShardDataset")
_EPOCH_SPEC = tf.TensorSpec([], tf.int64)


class WorkerInput:
    """An input in parts, which workers read themselves: each its own, and then those of workers that are lost.

    Args:
        make_dataset: from (worker, key of the pass) to the worker's `tf.data.Dataset`; traced once per worker.
        num_workers: the number of workers.
        num_batches: how many batches one pass has in all, where that is known.
        key_spec: the `tf.TensorSpec` of keys.
        key_of: from the epoch in which a pass begins to its key, by which all workers know it; called once per pass.
    """

    sends_batches = False
    reads_once = False

    def __init__(
        self,
        make_dataset: Callable[[int, tf.Tensor], tf.data.Dataset],
        num_workers: int,
        *,
        num_batches: int | None = None,
        key_spec: tf.TensorSpec = _EPOCH_SPEC,
        key_of: Callable[[int], tf.Tensor] = lambda epoch: tf.constant(epoch, tf.int64),
    ) -> None:
        self._key_spec, self._key_of = key_spec, key_of
        self._key: tf.Tensor | None = None
        self._element_specs: list[Any] = [None] * num_workers
        self._not_deterministic = False
        self._parts = [_Part(self._trace(make_dataset, worker), key_spec) for worker in range(num_workers)]
        self._lock = threading.Lock()
        self._must_end = False
        self.num_batches = num_batches
        self._reset()

    def _reset(self) -> None:
        self._consumed: list[int] = [0] * len(self._parts)
        # A part is "reserved" for its worker, "taken", "released" or "read".
        self._states = ["reserved"] * len(self._parts)

    def _trace(self, make_dataset: Callable[[int, tf.Tensor], tf.data.Dataset], worker: int) -> Any:
        def trace(make: Callable[[tf.Tensor], tf.data.Dataset]) -> Any:
            def dataset_of_worker(key: tf.Tensor) -> Any:
                dataset = quickly_deleted(make(key).prefetch(tf.data.AUTOTUNE))
                self._element_specs[worker] = dataset.element_spec
                self._not_deterministic |= _options(dataset).deterministic is False
                return dataset, dataset.cardinality()

            signature = [self._key_spec]
            return tf.function(dataset_of_worker, autograph=False, input_signature=signature).get_concrete_function()

        function = trace(functools.partial(make_dataset, worker))
        if any(outer.dtype == tf.variant for outer, _ in function.graph.captures):
            # It uses a dataset that was made before, and lives here.
            made_before = make_dataset(worker, tf.zeros(self._key_spec.shape, self._key_spec.dtype))
            _reject_python_calls(dataset_graph(made_before))
            sent = as_graph(made_before)
            function = trace(sent)
        return function

    def reject_python_calls(self) -> None:
        """Raises `InputError` where a worker's dataset calls Python functions, which live in this process alone."""
        for part in self._parts:
            _reject_python_calls(part.function.graph.as_graph_def())

    @property
    def never_ends(self) -> bool:
        """Whether it can be seen, without asking a worker, that a worker's dataset never ends."""
        return any(_repeats_for_ever(part.function.graph.outputs[0]) for part in self._parts)

    @property
    def leaves_order_open(self) -> bool:
        """Whether a dataset that is made twice may come in two orders."""
        return self._not_deterministic or any(leaves_order_open(part.function.graph.as_graph_def()) for part in self._parts[:1])

    @property
    def differences(self) -> str | None:
        """What the workers' datasets yield, in words, where that is not the same on each worker."""
        if all(spec == self._element_specs[0] for spec in self._element_specs):
            return None
        return ", ".join(f"{spec} on worker {worker}" for worker, spec in enumerate(self._element_specs))

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

    @property
    def all_read(self) -> bool:
        with self._lock:
            return all(state == "read" for state in self._states)

    @property
    def has_released(self) -> bool:
        with self._lock:
            return "released" in self._states

    def start_pass(self, epoch: int, *, must_end: bool) -> None:
        with self._lock:
            self._key, self._must_end = self._key_of(epoch), must_end
            self._reset()

    def take(self, num_steps: int) -> tuple[int, list[Any] | None, int]:
        return num_steps, None, 0

    def count(self, part: int | None, steps: int) -> int:
        assert part is not None  # a worker without a part has no data to do steps on
        with self._lock:
            first = self._consumed[part]
            self._consumed[part] += steps
        return first

    def finish(self, part: int | None) -> None:
        if part is not None:
            with self._lock:
                self._states[part] = "read"

    def release(self, part: int | None) -> None:
        if part is not None:
            with self._lock:
                if self._states[part] != "read":
                    self._states[part] = "released"

    def make_source(self) -> WorkerSource:
        part = self._take_part(_compat.get_current_dispatch_context().worker_index)
        if part is None:
            return WorkerSource(None, remaining=0)
        try:
            return self._open(part)
        except BaseException:
            self.release(part)
            raise

    def _take_part(self, worker: int) -> int | None:
        """The worker's own part where it can have it, else one that another has left."""
        with self._lock:
            free = [part for part, state in enumerate(self._states) if state == "released"]
            part = worker if self._states[worker] in ("reserved", "released") else free[0] if free else None
            if part is not None:
                self._states[part] = "taken"
            return part

    def _open(self, part: int) -> WorkerSource:
        """A new iterator on the current device, behind the batches of the part that are done."""
        dataset, cardinality = self._parts[part].make(self._key)
        cardinality = int(fetch([cardinality])[0])
        consumed = self._consumed[part]
        if cardinality == tf.data.INFINITE_CARDINALITY:
            if self._must_end:
                raise endless_input()
            return WorkerSource(iter(dataset), part)
        if consumed:
            dataset = dataset.skip(consumed)
        if cardinality == tf.data.UNKNOWN_CARDINALITY:
            return WorkerSource(iter(dataset), part, checked=True)
        return WorkerSource(iter(dataset), part, cardinality - consumed)

    def on_epoch_begin(self) -> None:
        """Workers need no telling."""

    def on_epoch_end(self) -> None:
        """Workers need no telling."""


class _Part:
    """What makes one part of an input, on whichever worker reads it.

    Args:
        function: the concrete function, from the key of an epoch to the dataset and its cardinality.
        key_spec: the spec of the key.
    """

    def __init__(self, function: Any, key_spec: tf.TensorSpec) -> None:
        self.function = function
        self._captures = list(function.captured_inputs)
        self._lookup_tables = LookupTables(function)
        make = tf.function(self._make, autograph=False, input_signature=[key_spec])
        self._make_with_copies = make.get_concrete_function() if self._lookup_tables else function

    def make(self, key: tf.Tensor | None) -> Any:
        """The dataset, on the device at hand, and its cardinality."""
        self._lookup_tables.bring()
        return self._make_with_copies(key)

    def _make(self, key: tf.Tensor) -> Any:
        return call_with(self._lookup_tables.handles(), self.function, self._captures, key)


def endless_input() -> InputError:
    """The error of data that never end, where one pass over them was asked for."""
    return InputError(
        "The input never ends, so an epoch of it would not. Expected: `steps_per_epoch`, or a dataset that ends "
        "(`evaluate` and `predict`: `steps`; `validation_data`: `validation_steps`). Received: none of them, and an infinite "
        "dataset. Pass `steps_per_epoch`, or drop `.repeat()`."
    )


def _repeats_for_ever(dataset: tf.Tensor) -> bool:
    """Whether a dataset in a graph was repeated without end, and not cut since; a look that may miss one."""
    op = dataset.op
    while op.type in _KEEP_LENGTH or op.type.startswith(
        ("Map", "ParallelMap", "Batch", "ParallelBatch", "PaddedBatch", "Shuffle")
    ):
        op = op.inputs[0].op
    count = tf.get_static_value(op.inputs[1]) if op.type == "RepeatDataset" else None
    return count is not None and int(count) < 0


def dataset_graph(dataset: tf.data.Dataset) -> Any:
    """The `GraphDef` that makes the dataset."""
    return tf.compat.v1.GraphDef.FromString(_compat.serialize_dataset_to_graph(dataset).numpy())


def python_calls(graph_def: Any) -> list[str]:
    """The kinds of operations in a `GraphDef` that call Python functions of this process, which no other can."""
    nodes = [*graph_def.node, *(node for function in graph_def.library.function for node in function.node_def)]
    return sorted({node.op for node in nodes if "PyFunc" in node.op})


def _reject_python_calls(graph_def: Any) -> None:
    calls = python_calls(graph_def)
    if not calls:
        return
    raise InputError(
        "The dataset that `dataset_fn` returned calls Python functions (`from_generator`, `py_function`, `numpy_function`), "
        "which live in this process, where the workers cannot reach them. Expected: a pipeline of TensorFlow operations. "
        f"Received: {', '.join(calls)}. Write it with TensorFlow operations, or pass the dataset itself instead of a "
        "`DatasetCreator`: it is then read here, and its batches are sent to the workers."
    )


def as_graph(
    dataset: tf.data.Dataset, fill: Callable[[tf.Tensor], tf.Tensor] | None = None
) -> Callable[[tf.Tensor], tf.data.Dataset]:
    """What makes the same dataset elsewhere: a dataset lives where it was made, its graph can travel.

    Args:
        dataset: the dataset.
        fill: from the key of a pass to the serialized graph, where that is not the same in each.

    Returns:
        From the key of a pass to the dataset.
    """
    element_spec, cardinality = dataset.element_spec, int(dataset.cardinality())
    graph = _compat.serialize_dataset_to_graph(dataset) if fill is None else None

    def make(key: tf.Tensor) -> tf.data.Dataset:
        copy = _compat.deserialize_dataset_from_graph(graph if fill is None else fill(key), element_spec)
        if cardinality == tf.data.UNKNOWN_CARDINALITY:
            return copy
        return copy.apply(tf.data.experimental.assert_cardinality(cardinality))  # a graph does not know

    return make


def _options(dataset: tf.data.Dataset) -> tf.data.Options:
    with warnings.catch_warnings():
        # In a graph, TensorFlow knows what Python code has set, and warns that there may be more.
        warnings.filterwarnings("ignore", message="To make it possible to preserve tf.data options")
        return dataset.options()


def quickly_deleted(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The dataset, without tuning that goes on for ever, unless its options ask for it.

    The thread that tunes an iterator wakes up ever more rarely, in the end once a minute, and who deletes the iterator waits
    for that; so does everything that is sent to its task afterwards. What is left to AUTOTUNE gets a thread per core.
    """
    if _options(dataset).autotune.enabled is None:
        options = tf.data.Options()
        options.autotune.enabled = False
        dataset = dataset.with_options(options)
    return dataset


class FedInput:
    """An input that this process reads; its batches travel with the executions, to whichever worker is free.

    Args:
        dataset: what to read, batch by batch; a `tf.data.Dataset` that this process alone can read.
        num_batches: how many batches one pass has, where that is known.
        adapter: a data adapter of Keras that wants to be told of epochs.
        reads_once: whether a second pass finds no more than what Keras keeps of a generator, its first batch.
    """

    sends_batches = True

    def __init__(
        self, dataset: tf.data.Dataset, *, num_batches: int | None, adapter: Any = None, reads_once: bool = False
    ) -> None:
        self.reads_once = reads_once
        self._dataset = quickly_deleted(dataset)
        self._adapter = adapter
        self._iterator: Iterator[Any] = iter(())
        self._taken = 0
        self._repeats = False
        self.num_batches = num_batches

    @property
    def element_spec(self) -> Any:
        return _without_optionals(self._dataset.element_spec)

    @property
    def differences(self) -> str | None:
        return None

    @property
    def all_read(self) -> bool:
        return False  # its end shows when batches are taken; no worker meets it

    @property
    def has_released(self) -> bool:
        return False

    def start_pass(self, epoch: int, *, must_end: bool) -> None:
        del epoch
        self._repeats = not must_end and self.num_batches is not None
        self._restart()

    def _restart(self) -> None:
        self._iterator = iter(self._dataset)
        self._taken = 0

    def take(self, num_steps: int) -> tuple[int, list[Any] | None, int]:
        first, batches = self._taken, []
        for _ in range(num_steps):
            if self._repeats and self._taken == self.num_batches:
                self._restart()
            batch = next(self._iterator, None)
            if batch is None:
                break
            batches.append(_without_optionals(batch))
            self._taken += 1
        return len(batches), batches, first

    def make_source(self) -> WorkerSource:
        return WorkerSource(None)

    def count(self, part: int | None, steps: int) -> int:
        return 0

    def finish(self, part: int | None) -> None:
        """There are no parts."""

    def release(self, part: int | None) -> None:
        """There are no parts."""

    def on_epoch_begin(self) -> None:
        if self._adapter is not None:
            self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._adapter is not None:
            self._adapter.on_epoch_end()


def _without_optionals(structure: Any) -> Any:
    """None for each optional, which is how Keras's adapters give a None in a batch."""
    optional = (tf.OptionalSpec, tf.experimental.Optional)
    return tf.nest.map_structure(lambda leaf: None if isinstance(leaf, optional) else leaf, structure)
