"""The interface of an input: to the loop, and to a worker that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf


@dataclass(frozen=True, eq=False)
class OpenDataset:
    """A split of the input, open on one worker.

    Args:
        iterator: the iterator, alive on the worker for as long as this is; None where there is
            nothing to read there, since batches travel with executions.
        left: the batches that are left, where the dataset knows it; None where it does not, or
            never ends.
        is_checked: whether the data end at a point that only reading finds.
        is_endless: whether it is known that they never end.
        has_order: whether who opens the split again finds the same batches at the same places.
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
        num_steps: its steps; 0 where the data have ended.
        batches: where batches travel, one for each step; else None.
        first_batch: the place in the input of the first of `batches`.
    """

    num_steps: int
    batches: list[Any] | None = None
    first_batch: int = 0


class Input(Protocol):
    """The data of a `fit`, `evaluate` or `predict`.

    `num_batches` is the length of one pass in all, where it is known. `num_splits` is the number of
    workers where each reads a split by itself, and 0 where batches travel with executions, which
    `sends_batches` says too. `reads_once`: there is one pass over the data, and no second.
    """

    num_batches: int | None
    num_splits: int
    sends_batches: bool
    reads_once: bool

    @property
    def element_spec(self) -> Any:
        """The `tf.TypeSpec` structure that fits all batches."""

    @property
    def differences(self) -> str | None:
        """In words, what batches workers get, where these have not the same shapes; else None."""

    def start_pass(self, epoch: int, *, must_end: bool) -> None:
        """Begin a pass over the data, at the beginning of `epoch`.

        Args:
            epoch: the number of the epoch.
            must_end: whether data that never end are an error.
        """

    def position(self, *, in_epoch: bool) -> dict[str, Any]:
        """Return where this process stands in the input, in values that JSON can hold.

        Call when nothing is in flight. It does not say how far workers have read their splits.

        Args:
            in_epoch: whether the epoch that was begun last is to go on there.
        """

    def resume_pass(
        self, position: dict[str, Any], confirmed: Sequence[int], *, must_end: bool
    ) -> None:
        """Go on in a pass that was begun before, maybe in another process.

        Args:
            position: what `position` returned.
            confirmed: of each split, how many batches were counted.
            must_end: as for `start_pass`.

        Raises:
            KeyError, TypeError, ValueError: it is the position of another kind of input.
        """

    def resume_order(self, position: dict[str, Any], *, passes_to_repeat: int) -> None:
        """Make the next passes those that come after `position`.

        Args:
            position: what `position` returned.
            passes_to_repeat: how many of the last passes before it are to come once more.

        Raises:
            KeyError, TypeError, ValueError: it is the position of another kind of input.
        """

    def next_batches(self, num_steps: int) -> NextBatches:
        """Return the data of an execution of at most `num_steps` steps. Thread: `fit`'s."""

    def open(self, split: int | None, skip: int) -> OpenDataset:
        """Open a split behind its first `skip` batches, on the current device.

        Thread: that of the worker's session. Where batches travel, `split` is None.
        """

    def on_epoch_begin(self) -> None:
        """Note that an epoch begins."""

    def on_epoch_end(self) -> None:
        """Note that an epoch has ended."""
