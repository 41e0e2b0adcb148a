"""What NumPy makes of a stream of ids that a table with eviction is trained on, step by step."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from kerasps.dynamic.ids.keys import mixed, part_of
from kerasps.dynamic.policies.regions import spread_positions

TOGETHER, DRAWS, EVERY, MORE, LOOKED_AT = 8, 256, 8, 64, 64


class ModelOfPart:
    """The rows of a table on one ps.

    Args:
        most: the rows that may be there.
        eviction: the rule by which they are given up.
        least: the rows that stay.
    """

    def __init__(self, most, eviction, least=0):
        self.most, self.eviction, self.least = most, eviction, least
        self.tick = self.evicted = self.ages = self.refused = 0
        self.places, self.ids, self.free, self.used = {}, {}, [], 0
        self.last, self.updates, self.made = {}, {}, {}
        self.gone = []

    def push(self, ids, norm_of=None):
        """Takes in the different ids of a step; `norm_of` returns the norm of the row of an id."""
        self.tick += 1
        new = [key for key in ids if key not in self.places]
        num_made = max(0, min(len(new), self.most - len(self.places)))
        self.refused += len(new) - num_made
        for key in new[:num_made]:
            place = self.free.pop() if self.free else self._next_place()
            self.places[key], self.ids[place] = place, key
            self.updates[place], self.made[place] = 0, self.tick
        for key in ids:
            if key in self.places:
                place = self.places[key]
                self.last[place], self.updates[place] = self.tick, self.updates[place] + 1
        if self.eviction.ttl_steps:
            self._expire()
        low = max(int(self.eviction.low * self.most), self.least)
        is_turn = self.tick % EVERY == 0
        if is_turn or len(self.places) + num_made > (low + self.most) // 2:
            most = 2 * num_made * (EVERY if is_turn else 1) + MORE
            self._give_up(min(max(len(self.places) - low, 0), most), norm_of)

    def _next_place(self):
        self.used += 1
        return self.used - 1

    def _remove(self, places):
        for place in places:
            self.gone.append(self.ids[place])
            del self.places[self.ids.pop(place)]
            self.ages += self.tick - self.last[place]
        self.evicted += len(places)
        self.free += places

    def _expire(self):
        count = min(self.used, LOOKED_AT)
        places = [(self.tick * LOOKED_AT + number) % self.used for number in range(count)]
        over = [
            place
            for place in places
            if place in self.ids and self.tick - self.last[place] > self.eviction.ttl_steps
        ]
        self._remove(over[: max(0, len(self.places) - self.least)])

    def _give_up(self, count, norm_of):
        if not count:
            return
        draws = -(-count // TOGETHER)
        numbers = tf.range(draws, dtype=tf.int64)
        seeds = mixed(mixed(tf.constant(self.tick, tf.int64)) + numbers)
        of_all, size = tf.fill([draws], np.int64(draws)), tf.fill([draws], np.int64(self.used))
        drawn = spread_positions(seeds, numbers, of_all, size, DRAWS)
        chosen = []
        for number, places in enumerate(drawn.numpy()):
            may_go = [
                place for place in places if place in self.ids and self.last[place] < self.tick
            ]
            may_go.sort(key=lambda place: self._score(place, norm_of))
            chosen += may_go[: min(TOGETHER, count - TOGETHER * number)]
        self._remove(chosen)

    def _score(self, place, norm_of):
        order = self.eviction.order
        if order == "norm":
            return norm_of(self.ids[place])
        return {"lru": self.last, "lfu": self.updates, "age": self.made}[order][place]


class ModelOfTable:
    """The rows of a table on all ps."""

    def __init__(self, table, num_parts):
        most = table.max_rows // num_parts
        least = -(-table.eviction.min_rows // num_parts)
        self.parts = [ModelOfPart(most, table.eviction, least) for _ in range(num_parts)]
        self._table = table

    def push(self, ids):
        """Takes in the ids of a step."""
        flat = np.ravel(ids)
        different = flat[np.sort(np.unique(flat, return_index=True)[1])]
        keys = self._table.embeddings.storage.table.keys(tf.constant(different, tf.int64))
        part = np.asarray(part_of(keys, len(self.parts)))
        norms = {}
        if self._table.eviction.order == "norm":
            known = [key for of_part in self.parts for key in of_part.places]
            known = np.array(known + list(different))
            norms = dict(zip(known, np.sum(self._table.rows(known) ** 2, 1), strict=True))
        for number, of_part in enumerate(self.parts):
            of_part.push(different[part == number].tolist(), norms.get)

    @property
    def gone(self):
        """The ids whose rows were given up, ascending, as often as they were."""
        return sorted(key for part in self.parts for key in part.gone)

    def assert_equals(self):
        """Asserts that the table has the same rows, with the same figures."""
        kept = sorted(key for part in self.parts for key in part.places)
        found = np.sort(np.concatenate([ids for ids, _ in self._table.items()]))
        np.testing.assert_array_equal(found, kept)
        figures = self._table.figures()
        evicted = sum(part.evicted for part in self.parts)
        assert figures["rows"] == len(kept)
        assert figures["evicted"] == evicted
        assert figures["refused_for_room"] == sum(part.refused for part in self.parts)
        mean = sum(part.ages for part in self.parts) / max(evicted, 1)
        assert figures["mean_age_of_evicted"] == mean
        assert figures["inserted"] == len(kept) + evicted
