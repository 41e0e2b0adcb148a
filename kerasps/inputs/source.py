"""The interface of an input, for the loop and for a worker that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf


@dataclass(frozen=True, eq=False)
class OpenDataset:
    """A split of the input, open on one worker.

    Args:
        iterator: the iterator, alive on the worker for as long as this object; None if the worker
            reads nothing, because batches are sent with executions.
        left: the number of remaining batches; None if the dataset does not know it or never ends.
        is_checked: whether only reading finds the end of the data.
        is_endless: whether it is known that the data never end.
        has_order: whether the split, opened again, has the same batches at the same places.
    """

    iterator: tf.data.Iterator | None
    left: int | None = None
    is_checked: bool = False
    is_endless: bool = False
    has_order: bool = True

    @property
    def resource(self) -> tf.Tensor | None:
        """The resource of the iterator, which a step graph takes as its argument."""
        if self.iterator is None:
            return None
        (resource,) = tf.nest.flatten(self.iterator, expand_composites=True)
        return resource

    @property
    def spec(self) -> tf.data.IteratorSpec | None:
        """The type of the iterator."""
        return None if self.iterator is None else tf.data.IteratorSpec(self.iterator.element_spec)


@dataclass(frozen=True, eq=False)
class NextBatches:
    """The data of the next execution.

    Args:
        num_steps: the number of its steps; 0 if the data have ended.
        batches: one batch for each step if batches are sent; else None.
        first_batch: the place in the input of the first of `batches`.
    """

    num_steps: int
    batches: list[Any] | None = None
    first_batch: int = 0


class Input(Protocol):
    """The data of a `fit`, `evaluate` or `predict`.

    `num_batches` is the length of one whole pass, or None if that is unknown. `num_splits` is the
    number of workers if each reads a split; it is 0 if batches are sent with executions, and then
    `sends_batches` is True. If `reads_once` is True, the data allow one pass only. If
    `begins_again` is True, the user repeats the data without end: the next pass begins when one
    ends, also within an epoch.
    """

    num_batches: int | None
    num_splits: int
    sends_batches: bool
    reads_once: bool
    begins_again: bool

    @property
    def element_spec(self) -> Any:
        """The `tf.TypeSpec` structure that fits all batches."""

    @property
    def differences(self) -> str | None:
        """The specs of the workers' batches, in words, if they differ; else None."""

    def start_pass(self, epoch: int, *, must_end: bool) -> None:
        """Begin a pass over the data, at the beginning of `epoch`."""

    def position(self, *, in_epoch: bool) -> dict[str, Any]:
        """Return this process's position in the input, in values that JSON can hold.

        Call when nothing is in flight. The position does not include how far workers have read
        their splits.

        Args:
            in_epoch: whether the epoch that was begun last will continue from there.
        """

    def resume_pass(
        self, position: dict[str, Any], confirmed: Sequence[int], *, must_end: bool
    ) -> None:
        """Continue a pass that was begun before, possibly in another process.

        Args:
            position: the result of `position`.
            confirmed: for each split, the number of batches that were counted.
            must_end: as for `start_pass`.

        Raises:
            KeyError, TypeError, ValueError: it is the position of another kind of input.
        """

    def resume_order(self, position: dict[str, Any], *, passes_to_repeat: int) -> None:
        """Make the next passes those that come after `position`.

        Raises:
            KeyError, TypeError, ValueError: it is the position of another kind of input.
        """

    def next_batches(self, num_steps: int) -> NextBatches:
        """Return the data of an execution of at most `num_steps` steps. Thread: `fit`'s."""

    def open(self, split: int | None, skip: int, reader: int | None = None) -> OpenDataset:
        """Open a split after its first `skip` batches, on the current device.

        `reader` is the worker that reads it; by default the one with the number of the split.
        Thread: that of the worker's session. If batches are sent, `split` is None.
        """

    def on_epoch_begin(self) -> None:
        """Handle the beginning of an epoch."""

    def on_epoch_end(self) -> None:
        """Handle the end of an epoch."""
