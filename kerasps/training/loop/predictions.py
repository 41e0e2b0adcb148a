"""Puts the outputs of `predict` into the order of the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Predictions:
    """The outputs of the batches of one `predict`, in the order of the input.

    Each worker reads a split, so outputs come back in any order. Callbacks and callers get them in
    the order of the input. Thread: `fit`'s.
    """

    def __init__(self, num_splits: int) -> None:
        self._num_splits = num_splits
        # Outputs that came before earlier ones of the input, by their place in the input.
        self._early: dict[int, Any] = {}
        self._in_order: list[Any] = []
        # The number of batches of which callbacks know.
        self.num_reported = 0

    @property
    def reported(self) -> list[Any]:
        """The outputs of which callbacks know, batch by batch."""
        return self._in_order[: self.num_reported]

    def add(self, outputs: Sequence[object], split: int | None, first: int) -> None:
        """Add the outputs of batches that follow each other in a split."""
        for place, output in enumerate(outputs, start=first):
            # Split i of n has the batches i, i + n, i + 2n, ... of the input.
            self._early[place if split is None else place * self._num_splits + split] = output
        while len(self._in_order) in self._early:
            self._in_order.append(self._early.pop(len(self._in_order)))

    def end(self) -> None:
        """Note that nothing more comes. Keep outputs behind gaps, if splits are inconsistent."""
        self._in_order += [self._early.pop(place) for place in sorted(self._early)]

    def next_to_report(self, num_batches: int, *, is_last: bool = False) -> list[Any]:
        """Return the outputs of the next batches, of which callbacks know from now on.

        Args:
            num_batches: the number of batches; returns none while there are fewer.
            is_last: True to return fewer too, since no more come.
        """
        outputs = self._in_order[self.num_reported : self.num_reported + num_batches]
        if len(outputs) < num_batches and not is_last:
            return []
        self.num_reported += len(outputs)
        return outputs
