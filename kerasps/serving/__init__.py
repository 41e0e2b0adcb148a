"""Deltas of a training, and the reader and the follower that serve them.

Contract: needs nothing of the training, and connects to nothing. A reader of a directory gets each
delta once, in order, or an error that names a file; and no part of a delta whose files are wrong.
"""

from __future__ import annotations

from kerasps.serving.deltas import Delta, State, TableDelta
from kerasps.serving.follower import Follower
from kerasps.serving.reader import DeltaReader

__all__ = ["Delta", "DeltaReader", "Follower", "State", "TableDelta"]

# Users import them from here.
for _public in (Delta, DeltaReader, Follower, State, TableDelta):
    _public.__module__ = __name__
