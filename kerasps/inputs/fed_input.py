"""An input that this process reads; it sends the batches with the executions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps.inputs.dataset_graphs import quickly_deleted
from kerasps.inputs.source import NextBatches, OpenDataset


class FedInput:
    """An input that this process reads; it sends batches with executions, to any worker.

    Args:
        dataset: the batches, a `tf.data.Dataset` that only this process can read.
        adapter: a data adapter of Keras whose epoch methods must be called.
        reads_once: whether a second pass yields only the batch that Keras keeps of a generator, the
            first one.
    """

    sends_batches = True
    begins_again = False
    num_splits = 0

    def __init__(
        self,
        dataset: tf.data.Dataset,
        *,
        num_batches: int | None,
        adapter: Any = None,
        reads_once: bool = False,
    ) -> None:
        self.reads_once = reads_once
        self._dataset = quickly_deleted(dataset)
        self._adapter = adapter
        self._iterator: Iterator[Any] = iter(())
        self._taken = 0
        self._repeats = False
        # The number of epochs that the adapter was told about since it was made.
        self._epochs = 0
        # The states of the generators of `random` and NumPy at the beginning of the pass: an
        # adapter that shuffles draws from them.
        self._random_state = _random_state()
        self.num_batches = num_batches

    @property
    def element_spec(self) -> Any:
        return _without_optionals(self._dataset.element_spec)

    @property
    def differences(self) -> str | None:
        return None

    def start_pass(self, epoch: int, *, must_end: bool) -> None:
        del epoch
        self._repeats = not must_end and self.num_batches is not None
        self._restart()

    def _restart(self) -> None:
        self._random_state = _random_state()
        self._iterator = iter(self._dataset)
        self._taken = 0

    def position(self, *, in_epoch: bool) -> dict[str, Any]:
        return {
            "taken": self._taken,
            "epochs_over": self._epochs - in_epoch,
            "random_of_pass": self._random_state,
            "random": _random_state(),
        }

    def resume_pass(
        self, position: dict[str, Any], confirmed: Sequence[int], *, must_end: bool
    ) -> None:
        del confirmed
        taken = int(position["taken"])
        self._tell_of_epochs(position)
        _set_random_state(position["random_of_pass"])
        self._repeats = not must_end and self.num_batches is not None
        self._restart()
        # The only way to a position is to read the batches before it.
        while self._taken < taken and next(self._iterator, None) is not None:
            self._taken += 1

    def resume_order(self, position: dict[str, Any], *, passes_to_repeat: int) -> None:
        del passes_to_repeat
        self._tell_of_epochs(position)
        _set_random_state(position["random"])

    def _tell_of_epochs(self, position: dict[str, Any]) -> None:
        """Tell the adapter about past epochs: it may shuffle at the end of each."""
        for _ in range(int(position["epochs_over"]) - self._epochs):
            self.on_epoch_begin()
            self.on_epoch_end()

    def next_batches(self, num_steps: int) -> NextBatches:
        first, batches = self._taken, []
        for _ in range(num_steps):
            if self._repeats and self._taken == self.num_batches:
                self._restart()
            batch = next(self._iterator, None)
            if batch is None:
                break
            batches.append(_without_optionals(batch))
            self._taken += 1
        return NextBatches(len(batches), batches, first)

    def open(self, split: int | None, skip: int, reader: int | None = None) -> OpenDataset:
        return OpenDataset(None)

    def on_epoch_begin(self) -> None:
        self._epochs += 1
        if self._adapter is not None:
            self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        if self._adapter is not None:
            self._adapter.on_epoch_end()


def _random_state() -> list[Any]:
    """Return the states of the generators of `random` and NumPy, in values that JSON can hold."""
    version, internal, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [[version, list(internal), gauss], [str(kind), [int(key) for key in keys], *rest]]


def _set_random_state(state: list[Any]) -> None:
    (version, internal, gauss), (kind, keys, *rest) = state
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))


def _without_optionals(structure: object) -> Any:
    """Replace optionals by None: Keras's adapters represent a None in a batch by an optional."""
    optional = (tf.OptionalSpec, tf.experimental.Optional)
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, optional) else leaf, structure
    )
