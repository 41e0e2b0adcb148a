"""Lists the objects of this process, to find those that no other list has."""

from __future__ import annotations

import gc
from typing import Any


def live_objects() -> list[Any]:
    """Return all objects that the garbage collector knows, also those that `gc.freeze` set aside.

    `gc.get_objects` leaves those out, and programs that fork freeze what they have before. So this
    has the collector consider them again.
    """
    if gc.get_freeze_count():
        gc.unfreeze()
    return gc.get_objects()
