"""An input that workers read, each a split of the dataset."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasps.errors import InputError
from kerasps.inputs.array_batches import gather_batches, with_gathered_batches
from kerasps.inputs.array_shards import cut_arrays
from kerasps.inputs.dataset_graphs import (
    as_graph,
    dataset_graph,
    endless_input,
    options_of,
    quickly_deleted,
    reject_python_calls,
)
from kerasps.inputs.dataset_order import leaves_order_open
from kerasps.inputs.iterators import open_iterator
from kerasps.inputs.pass_order import EpochOrder, PassOrder, key_from_json, key_to_json
from kerasps.inputs.source import NextBatches, OpenDataset
from kerasps.inputs.written_files import mark_of_split, mark_of_whole, mark_operations
from kerasps.runtime.fetching import fetch, sent
from kerasps.runtime.graph_optimizer import optimizing
from kerasps.variables import LookupTables, call_with

# Makes the dataset of a worker, given its index, the key of the pass, and a mark of files.
MakeDataset = Callable[[int, tf.Tensor, tf.Tensor], tf.data.Dataset]
# The marks of files with the same data on all workers, and of files with the data of a split.
_MARKS_SPEC = tf.TensorSpec([2], tf.string)
# Operations that keep a dataset finite or endless, besides those that map, batch and shuffle.
_KEEP_LENGTH = ("Identity", "OptionsDataset", "PrefetchDataset", "ShardDataset")


class WorkerInput:
    """An input in splits, which workers read: first their split, then those of lost workers.

    Args:
        make_dataset: returns the worker's `tf.data.Dataset`, given (worker, key of the pass, mark
            of files with the same data on all workers); traced once per worker.
        order: gives each pass its key, which all workers get. Default: the number of the pass's
            first epoch.
        is_whole: whether each dataset reads all data and drops those of other splits.
        begins_again: whether the data are one pass of those that the user repeats without end.
    """

    sends_batches = False
    reads_once = False

    def __init__(
        self,
        make_dataset: MakeDataset,
        num_workers: int,
        *,
        num_batches: int | None = None,
        order: PassOrder | None = None,
        is_whole: bool = False,
        begins_again: bool = False,
    ) -> None:
        self.begins_again = begins_again
        self._is_whole = is_whole
        self._order: PassOrder = order or EpochOrder()
        self._key_spec = self._order.key_spec
        self._key: tf.Tensor | None = None
        self._element_specs: list[Any] = [None] * num_workers
        self._not_deterministic = False
        self._splits = [
            _Split(self._trace(make_dataset, worker), self._key_spec)
            for worker in range(num_workers)
        ]
        self._must_end = False
        # For each split of data that never end: the batches that a resumed pass has read.
        self._endless_skips: dict[int, int] = {}
        self.num_batches = num_batches
        self.num_splits = num_workers

    def _trace(self, make_dataset: MakeDataset, worker: int) -> Any:
        def trace(make: Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]) -> Any:
            def dataset_of_worker(key: tf.Tensor, marks: tf.Tensor) -> Any:
                dataset = quickly_deleted(make(key, marks[0]).prefetch(tf.data.AUTOTUNE))
                graph = tf.compat.v1.get_default_graph()
                gather_batches(graph)
                cut_arrays(dataset)
                mark_operations(graph, marks[0] if self._is_whole else marks[1])
                self._element_specs[worker] = dataset.element_spec
                self._not_deterministic |= options_of(dataset).deterministic is False
                return dataset, dataset.cardinality()

            signature = [self._key_spec, _MARKS_SPEC]
            return tf.function(
                dataset_of_worker, autograph=False, input_signature=signature
            ).get_concrete_function()

        function = trace(functools.partial(make_dataset, worker))
        if any(outer.dtype == tf.variant for outer, _ in function.graph.captures):
            # It uses a dataset that was made before, in this process.
            no_key = tf.zeros(self._key_spec.shape, self._key_spec.dtype)
            made_before = make_dataset(worker, no_key, tf.constant(""))
            graph_def = dataset_graph(made_before)
            reject_python_calls(graph_def)
            serialized = tf.constant(with_gathered_batches(graph_def).SerializeToString())
            length = int(made_before.cardinality())
            make = as_graph(made_before.element_spec, length, lambda key: serialized)
            function = trace(lambda key, mark: make(key))
        return function

    def reject_python_calls(self) -> None:
        """Raise `InputError` if a worker's dataset calls Python functions of this process."""
        for split in self._splits:
            reject_python_calls(split.function.graph.as_graph_def())

    @property
    def never_ends(self) -> bool:
        """True if the graph of a worker's dataset shows that it never ends; calls no worker."""
        return any(_repeats_for_ever(split.function.graph.outputs[0]) for split in self._splits)

    @functools.cached_property
    def leaves_order_open(self) -> bool:
        """True if a dataset that is made twice may have two orders."""
        return self._not_deterministic or any(
            leaves_order_open(split.function.graph.as_graph_def()) for split in self._splits[:1]
        )

    @property
    def differences(self) -> str | None:
        """The specs of the workers' datasets, in words, if they differ; else None."""
        if all(spec == self._element_specs[0] for spec in self._element_specs):
            return None
        return ", ".join(
            f"{spec} on worker {worker}" for worker, spec in enumerate(self._element_specs)
        )

    @property
    def element_spec(self) -> Any:
        """The most specific `tf.TypeSpec` structure that fits the batches of all workers."""
        first, *others = self._element_specs

        def common(spec: tf.TypeSpec, *rest: tf.TypeSpec) -> Any:
            merged = spec.most_specific_common_supertype(list(rest))
            if merged is None:
                raise InputError(
                    "The workers' datasets must yield batches of one structure, dtype and rank. "
                    f"Received: {spec} on worker 0 and {rest} on the others. Make `dataset_fn` "
                    "return the same structure, dtypes and ranks on each worker."
                )
            return merged

        try:
            return tf.nest.map_structure(common, first, *others)
        except (TypeError, ValueError) as exc:
            if isinstance(exc, InputError):
                raise
            raise InputError(
                "The workers' datasets must yield batches of one structure. Received: "
                f"{self._element_specs}. Make `dataset_fn` return the same structure on each "
                "worker."
            ) from exc

    def start_pass(self, epoch: int, *, must_end: bool) -> None:
        self._key, self._must_end = self._order.next_key(epoch), must_end
        self._endless_skips = {}

    def position(self, *, in_epoch: bool) -> dict[str, Any]:
        del in_epoch
        key = None if self._key is None else key_to_json(self._key)
        return {"key": key, "order": self._order.state()}

    def resume_pass(
        self, position: dict[str, Any], confirmed: Sequence[int], *, must_end: bool
    ) -> None:
        self._order.restore(position["order"], passes_to_repeat=0)
        self._key = key_from_json(position["key"], self._key_spec)
        self._must_end = must_end
        # If the order differs each time, there is no position to resume from.
        is_ordered = not self.leaves_order_open
        self._endless_skips = dict(enumerate(confirmed)) if is_ordered else {}

    def resume_order(self, position: dict[str, Any], *, passes_to_repeat: int) -> None:
        self._order.restore(position["order"], passes_to_repeat=passes_to_repeat)

    def next_batches(self, num_steps: int) -> NextBatches:
        return NextBatches(num_steps)

    def open(self, split: int | None, skip: int, reader: int | None = None) -> OpenDataset:
        assert split is not None  # `num_splits` is not 0
        reader = split if reader is None else reader
        of_whole = mark_of_whole(reader, self.num_splits)
        marks = tf.constant([of_whole, mark_of_split(split, reader, self.num_splits)])
        assert self._key is not None  # `start_pass` comes before
        # The graph contains arrays, which each pass of the optimizer would copy. TensorFlow does
        # not optimize the making of datasets outside of functions either.
        with optimizing(is_on=False):
            dataset, cardinality = self._splits[split].make(sent(self._key), sent(marks))
        cardinality = int(fetch([cardinality])[0])
        if cardinality == tf.data.INFINITE_CARDINALITY:
            if self._must_end:
                raise endless_input()
            # After the loss of a worker, its split starts from the beginning: any batches will do.
            # A resumed pass continues where it was. Compare `skip`, since a resumed split may be
            # opened more than once before its first result.
            resumed = self._endless_skips.get(split, 0)
            dataset = dataset.skip(resumed) if resumed and skip == resumed else dataset
            return OpenDataset(open_iterator(dataset), is_endless=True)
        if skip:
            # A position in data that were read as endless may lie behind the end of the pass.
            skip = skip if cardinality < 0 else min(skip, cardinality)
            dataset = dataset.skip(skip)
        if cardinality == tf.data.UNKNOWN_CARDINALITY:
            return OpenDataset(open_iterator(dataset), is_checked=True)
        has_order = not self.leaves_order_open
        return OpenDataset(open_iterator(dataset), left=cardinality - skip, has_order=has_order)

    def on_epoch_begin(self) -> None:
        """Do nothing: workers do not depend on epochs."""

    def on_epoch_end(self) -> None:
        """Do nothing: workers do not depend on epochs."""


class _Split:
    """Makes the dataset of one split, on the worker that reads it."""

    def __init__(
        self, function: tf.types.experimental.ConcreteFunction, key_spec: tf.TensorSpec
    ) -> None:
        self.function = function
        self._captures = list(function.captured_inputs)
        self._lookup_tables = LookupTables(function)
        make = tf.function(self._make, autograph=False, input_signature=[key_spec, _MARKS_SPEC])
        self._make_with_copies = make.get_concrete_function() if self._lookup_tables else function

    def make(self, key: tf.Tensor | None, marks: tf.Tensor | None = None) -> Any:
        """Return the dataset, on the current device, and its cardinality.

        Without `marks`, files that the dataset writes have their own names.
        """
        self._lookup_tables.bring()
        marks = tf.constant(["", ""]) if marks is None else marks
        return self._make_with_copies(key, marks)

    def _make(self, key: tf.Tensor, marks: tf.Tensor) -> Any:
        return call_with(self._lookup_tables.handles(), self.function, self._captures, key, marks)


def _repeats_for_ever(dataset: tf.Tensor) -> bool:
    """Return whether a dataset in a graph repeats without end; some cases are not detected."""
    op = dataset.op
    while op.type in _KEEP_LENGTH or op.type.startswith(
        ("Map", "ParallelMap", "Batch", "ParallelBatch", "PaddedBatch", "Shuffle")
    ):
        op = op.inputs[0].op
    count = tf.get_static_value(op.inputs[1]) if op.type == "RepeatDataset" else None
    return count is not None and int(count) < 0
