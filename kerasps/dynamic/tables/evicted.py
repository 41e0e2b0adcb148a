"""The ids whose rows a table has given up, as its layer tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from kerasps.errors import InputError

# For each ps: when it began to note them, and how many it has noted.
Mark = tuple[tuple[int, int], ...]


class Table(Protocol):
    """A table in parts that note the ids of removed rows (see `TableAccess`)."""

    @property
    def num_parts(self) -> int: ...

    def gone_since(self, since: Sequence[int]) -> Sequence[Sequence[Any]]: ...


class EvictedIds(NamedTuple):
    """Ids whose rows were removed, by eviction or by hand.

    Attributes:
        ids: int64, those of each ps in their order. An id that came again since, and was removed
            again, is there twice.
        mark: what to pass as `since` to hear of later ones: a tuple of numbers.
        is_complete: False if there may be more ids, which the ps do not keep, or of which a ps
            that was replaced cannot know.
    """

    ids: np.ndarray
    mark: Mark
    is_complete: bool


def evicted_since(table: Table, since: object) -> EvictedIds:
    """Return the ids that were removed after a mark.

    Raises:
        InputError: `since` is no mark.
    """
    num_parts = table.num_parts
    known = _checked(since)
    # Another number of ps, or another ps: all that there are.
    known = known if len(known) == num_parts else ((0, 0),) * num_parts
    found = table.gone_since([0 if since is None else count for _, count in known])
    mark, ids, is_complete = [], [], True
    for (born, count), (born_now, count_now, of_part) in zip(known, found, strict=True):
        mark.append((int(born_now), int(count_now)))
        is_same = since is None or born == born_now
        is_complete &= is_same and len(of_part) == int(count_now) - count
        ids.append(of_part)
    return EvictedIds(np.concatenate(ids), tuple(mark), is_complete)


def _checked(since: object) -> Mark:
    if since is None:
        return ()
    try:
        return tuple((int(born), int(count)) for born, count in cast(Mark, since))
    except (TypeError, ValueError):
        raise InputError(
            "Argument `since` of `evicted` cannot be used. Expected: None, or the `mark` of an "
            f"earlier result. Received: {since!r}. Keep the mark that `evicted()` returns."
        ) from None
