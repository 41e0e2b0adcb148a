"""Admission in one process: the candidates of a layer, in weights of the layer."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.admission import Admission, CountAdmission, ProbabilityAdmission, drawn
from kerasps.dynamic.ids.rows_of_ids import CountsOfIds
from kerasps.dynamic.local.local_places import LocalPlaces, digest_of
from kerasps.dynamic.parts.regions import drawn_positions


class LocalCandidates(LocalPlaces):
    """The ids that have a count and no row yet, and their counts (see `LocalPlaces`)."""

    def __init__(self, add_weight: Callable[..., keras.Variable], max_candidates: int) -> None:
        super().__init__(
            add_weight, CountsOfIds(max_candidates), name="candidates", trainable=False
        )

    def places_of(self, ids: np.ndarray, *, makes: bool = False) -> np.ndarray:
        """Return the places of candidates, -1 for other ids."""
        del makes
        self.renew_index()
        return np.asarray(self.places(tf.constant(ids, tf.int64)))

    def find_rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the counts of candidates, `[len(ids), 1]`."""
        places = self.places_of(ids)
        counts = np.asarray(tf.gather(self.rows.value, np.maximum(places, 0)))
        return np.where(places[:, None] < 0, 0, counts).astype(np.int32)

    def replace_rows(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Replace all candidates and counts. Without room for all, the lowest are left out."""
        order = np.argsort(-rows[:, 0], kind="stable")[: self.num_places]
        super().replace_rows(ids[order], rows[order])

    def count(self, ids: tf.Tensor) -> tf.Tensor:
        """Count each of some different ids once more, and return their counts.

        If there are too many candidates, a new one replaces another that is drawn at random, or is
        not counted if that one is among `ids`.
        """
        self.renew_index()
        found = self.places(ids)
        new = tf.gather(ids, tf.where(found < 0)[:, 0])
        before = tf.convert_to_tensor(self.num_rows_now)
        over = before + tf.size(new, tf.int64) - self.num_places
        self._take_out(self._drawn(new, before, over, found))
        self.append(new[: self.num_places - self.num_rows_now])
        places = self.places(ids)
        counts = tf.gather(self.rows.value, tf.maximum(places, 0))[:, 0]
        counts = tf.where(places >= 0, counts, 0) + 1
        has_place = tf.where(places >= 0)[:, 0]
        self.write(tf.gather(places, has_place), tf.gather(counts, has_place)[:, None])
        return counts

    def forget(self, ids: tf.Tensor) -> None:
        """Remove candidates."""
        places = self.places(ids)
        self._take_out(tf.boolean_mask(places, places >= 0))

    def _drawn(
        self, new: tf.Tensor, num_rows: tf.Tensor, over: tf.Tensor, touched: tf.Tensor
    ) -> tf.Tensor:
        """Return the places of candidates to replace."""
        number = tf.range(tf.maximum(over, 0))
        drawn_places = drawn_positions(new[: tf.size(number)], number, over, num_rows)
        drawn_places = tf.boolean_mask(drawn_places, drawn_places >= 0)
        is_touched = tf.reduce_any(tf.equal(drawn_places[:, None], touched[None]), 1)
        return tf.boolean_mask(drawn_places, ~is_touched)

    def _take_out(self, places: tf.Tensor) -> None:
        """Remove the rows at different places; the last rows fill the holes."""
        num_rows = tf.convert_to_tensor(self.num_rows_now)
        left = num_rows - tf.size(places, tf.int64)
        is_late = places >= left
        at = tf.boolean_mask(places, is_late) - left
        stays = tf.tensor_scatter_nd_update(
            tf.ones(tf.shape(places), tf.bool), at[:, None], tf.zeros(tf.shape(at), tf.bool)
        )
        movers, holes = tf.where(stays)[:, 0] + left, tf.boolean_mask(places, ~is_late)
        ids, moved = (self.ids_at(chosen) for chosen in (places, movers))
        rows = tf.gather(self.rows.value, movers)
        change = digest_of(moved, holes) - digest_of(moved, movers) - digest_of(ids, places)
        self.index.remove(ids)
        self.index.insert(moved, holes)
        self.write(holes, rows, moved)
        self.set_size(left, change)


def admitted(
    admission: Admission | None, candidates: LocalCandidates | None, salt: np.int64, new: tf.Tensor
) -> tf.Tensor:
    """Return those of some different ids without rows that get one now; count the others."""
    if isinstance(admission, ProbabilityAdmission):
        return tf.boolean_mask(new, drawn(new, salt) < admission.bound)
    if not isinstance(admission, CountAdmission) or candidates is None:
        return new
    chosen = tf.boolean_mask(new, candidates.count(new) >= admission.n)
    candidates.forget(chosen)
    return chosen
