"""Finds the line of the user's code that a call came from."""

from __future__ import annotations

import inspect
from types import FrameType

# Modules that stand between the user's line and kerasps: `ExitStack`, and decorators of it.
_BETWEEN = ("kerasps", "contextlib")


def calling_line() -> str:
    """Return the file and line of the nearest caller outside of kerasps, as `"train.py:12"`."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _BETWEEN:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"
