"""A reader that follows the changes of a table."""

from __future__ import annotations

import json

import numpy as np


class Reader:
    """The rows of a layer, as the answers of `changed_since` tell them."""

    def __init__(self, layer):
        self._layer = layer
        self.version, self.rows = None, {}
        self.wholes = self.changed = 0

    def read(self, batch=1000):
        """Applies one answer; returns the reader."""
        # A version may be kept in a file.
        version = json.loads(json.dumps(self.version))
        changes = self._layer.changed_since(version, batch)
        if changes.is_whole:
            self.rows.clear()
            self.wholes += 1
            assert not len(changes.removed)
        for key in changes.removed.tolist():
            self.rows.pop(key, None)
        self.changed = 0
        for ids, rows in changes.pieces:
            assert 0 < len(ids) <= batch
            self.changed += len(ids)
            self.rows.update(zip(ids.tolist(), map(bytes, rows), strict=True))
        self.version = changes.version
        return self

    def assert_equals(self):
        """Asserts that these are the rows of the table, bit for bit."""
        assert self.rows == rows_of(self._layer)


def rows_of(layer):
    """Returns the bytes of each row, by id."""
    items = [*layer.items()]
    return {
        key: bytes(row)
        for ids, rows in items
        for key, row in zip(np.asarray(ids).tolist(), rows, strict=True)
    }
