"""The rows of a layer's table, as users read, load and remove them outside of steps."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from numpy.typing import ArrayLike

from kerasps.dynamic.ids.eviction import Eviction
from kerasps.dynamic.ids.keys import ids_of
from kerasps.dynamic.local.local_table import LocalTable
from kerasps.dynamic.tables.changed import ChangedRows
from kerasps.dynamic.tables.evicted import EvictedIds, evicted_since
from kerasps.errors import InputError, UnsupportedError
from kerasps.layers.arguments import refuse, whole_number
from kerasps.variables.lanes.phase import note_assignment


class LayerWithRows(keras.layers.Layer):
    """A layer whose table has rows by ids.

    Attributes:
        output_dim: the length of a row.
        eviction: the rule by which rows are given up; None for none.
        embeddings: the weight with the rows.
    """

    output_dim: int
    eviction: Eviction | None
    embeddings: Any
    # The table in this process; None if it is on ps.
    _local: LocalTable | None = None
    # The weight with the counts of candidates.
    _candidates: Any = None

    @property
    def num_rows(self) -> int:
        """The number of rows, over all ps."""
        return int(self._table.num_rows) if self.built else 0

    def figures(self) -> dict[str, int | float]:
        """Return the numbers of the table, summed over all ps.

        - `"rows"`: rows that there are.
        - `"bytes"`: the bytes of these rows and their slots.
        - `"inserted"`: rows that were made, in steps and by hand.
        - `"candidates"`: ids that have a count and no row (see `CountAdmission`).
        - `"refused_for_room"`: times that a row was not made since the table was full.
        - `"refused_by_admission"`: times that a row was not made since its id was not admitted.
          Each is a dropped gradient.
        - `"evicted"`: rows that were given up (see `Eviction`).
        - `"mean_age_of_evicted"`: the mean number of steps from the last update of these rows to
          the step that gave them up.
        - `"resurrected"`: rows that were given up while a step had pulled them, and that the step
          made anew to update them.
        - `"pushed_ids"`: with an eviction, the different ids of each step, summed over steps. The
          share of these that had a row is 1 - inserted / pushed_ids.

        All but rows, bytes and candidates begin at 0 when the table is made, and are in no file.
        """
        figures = dict(self._table.figures)
        if self._local is None:
            candidates = self._candidates
            figures["candidates"] = 0 if candidates is None else candidates.num_rows
        return figures

    def norms(self, sample: int = 1024) -> np.ndarray:
        """Return the Euclidean norms of some rows, drawn at random; of all if there are few.

        Args:
            sample: how many places each ps draws. Places without a row of this table do not count,
                so tables that share a storage get fewer norms.

        Returns:
            A vector of float32.
        """
        sample = whole_number("sample", sample, "such as 1024", least=1)
        table = self._table if self._local is not None else self._table.access
        return np.asarray(table.some_norms(sample))

    def rows(self, ids: ArrayLike) -> np.ndarray:
        """Return the rows of ids as an array of shape `[len(ids), output_dim]`; makes none.

        An id without a row has its default row.

        Args:
            ids: a vector of integers or strings: a list, an array or a tensor.
        """
        return np.asarray(self._table.find_rows(ids_of(ids)))

    def items(self, batch: int = 65536) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Return an iterator over all rows: pieces `(ids, rows)` of up to `batch`, in no order.

        The ids of strings are their int64 fingerprints. Their text is not stored.
        """
        batch = whole_number("batch", batch, "such as 65536", least=1)
        return iter(self._table.row_items(batch))

    def changed_since(self, version: object = None, batch: int = 65536) -> ChangedRows:
        """Return the rows that changed since a version, and the ids that have no row any more.

        The first call, of anyone and with any version, lets the ps note from then on in which
        version each row changes. A reader that applies all answers in turn, first the removed ids
        of each and then its rows, has the rows of the table, bit for bit. It may read in another
        thread while the training goes on: a ps is locked for some milliseconds at a time. What
        changes during an answer may be in it, and is in the next one.

        ```python
        copy, version = {}, None
        ...  # again and again
        changes = layer.changed_since(version)
        if changes.is_whole:
            copy.clear()
        for key in changes.removed:
            copy.pop(key, None)
        for ids, rows in changes.pieces:
            copy.update(zip(ids, rows))
        version = changes.version
        ```

        A ps keeps 4 bytes for each row, and the last 1,048,576 removed ids of all tables of this
        width. Without a strategy, each call compares all rows with a copy.

        Args:
            version: the `version` of an earlier answer. Default None: all rows.
            batch: the most rows in a piece.

        Returns:
            A `ChangedRows`: the `version` to pass next, `is_whole`, the `removed` ids and the
            `pieces` of ids and rows. `is_whole` is True without a version, and with one that is
            not known: of another table, of a ps that was replaced, or so old that removed ids are
            missing. The pieces are then all rows.

        Raises:
            InputError: `version` is no version.
        """
        batch = whole_number("batch", batch, "such as 65536", least=1)
        table = self._table
        if self._local is not None:
            return self._local.changed_since(version, batch)
        changes: ChangedRows = table.access.changes.since(version, batch)
        return changes

    def load_rows(self, ids: ArrayLike, rows: ArrayLike) -> None:
        """Set the rows of ids, and make those that are missing.

        Args:
            ids: a vector of different integers or strings.
            rows: an array of shape `[len(ids), output_dim]`.
        """
        vector = ids_of(ids)
        values = np.asarray(rows)
        if values.shape != (len(vector), self.output_dim):
            refuse(
                "rows",
                f"an array of shape {values.shape}",
                f"an array of shape ({len(vector)}, {self.output_dim})",
                "Give one row for each id",
            )
        num_different = len(np.unique(vector))
        if num_different < len(vector):
            refuse(
                "ids",
                f"{len(vector):,} ids, {num_different:,} of them different",
                "each id once",
                "Leave out repeated ids, with their rows",
            )
        self._table.write_rows(vector, values)

    def evict(self, ids: ArrayLike) -> int:
        """Remove the rows of ids, with their slots, and the counts of candidates.

        Files that are saved later do not have them. An id that comes again begins anew.

        Args:
            ids: a vector of integers or strings. Ids without a row are allowed.

        Returns:
            The number of rows that were removed.
        """
        vector = np.unique(ids_of(ids))
        if self._local is not None:
            return self._local.remove_rows(vector)
        table = self._table
        note_assignment()
        if self._candidates is not None:
            self._candidates.access.remove(vector)
        return int(table.access.remove(vector))

    def evict_where(self, *, older_than: int | datetime.timedelta) -> int:
        """Remove the rows whose last update was longer ago, with their slots.

        Files that are saved later do not have them. An id that comes again begins anew. Counts of
        candidates stay.

        Args:
            older_than: a number of steps of all workers, or a `datetime.timedelta` for an
                `Eviction` with `ttl_seconds`, which notes the time of updates.

        Returns:
            The number of rows that were removed.

        Raises:
            InputError: `older_than` is another value.
            UnsupportedError: the layer has no eviction, so nobody notes when rows are updated.
        """
        by_clock = isinstance(older_than, datetime.timedelta)
        needed = "an Eviction with `ttl_seconds`" if by_clock else "an Eviction"
        columns = () if self.eviction is None else self.eviction.columns
        if ("second" if by_clock else "used") not in columns:
            raise UnsupportedError(
                f"Nobody notes when the rows of the layer {self.name!r} are updated. Expected: "
                f"{needed}. Received: eviction={self.eviction!r}. Make the layer with one, or "
                "remove rows with `evict(ids)`."
            )
        if isinstance(older_than, datetime.timedelta):
            age = int(older_than.total_seconds())
        else:
            age = whole_number("older_than", older_than, "of steps, or a timedelta", least=0)
        table = self._table
        note_assignment()
        return int(table.access.remove_unused(age, by_clock=by_clock))

    def evicted(self, since: object = None) -> EvictedIds:
        """Return the ids whose rows were removed, by the eviction or by hand.

        Each ps keeps the last 65,536 of them, or `max_rows` divided by the number of ps if that is
        less. They are in no file.

        ```python
        gone = layer.evicted()
        ...  # later
        gone = layer.evicted(since=gone.mark)  # those since then
        ```

        Args:
            since: the `mark` of an earlier result. Default None: all that are kept.

        Returns:
            An `EvictedIds`: the `ids` of int64, the `mark` to pass next, and `is_complete`, which
            is False if there may be more ids than are kept.

        Raises:
            InputError: `since` is no mark.
            UnsupportedError: the layer has no eviction.
        """
        if self.eviction is None:
            raise UnsupportedError(
                f"The table of the layer {self.name!r} keeps no removed ids. Expected: a layer "
                "with an `Eviction`. Received: eviction=None. Keep the ids that you pass to "
                "`evict`, or make the layer with an eviction."
            )
        return evicted_since(self._table.access.table, since)

    @property
    def _table(self) -> Any:
        if not self.built:
            raise InputError(
                f"The layer {self.name!r} has no table yet. Expected: a built layer. Received: one "
                "that was not built. Call it on ids once, or call `layer.build()` in the scope of "
                "the strategy."
            )
        return self.embeddings if self._local is None else self._local
