"""The strategy of this process: TensorFlow connects a process once, so there is one in its life."""

from __future__ import annotations

from typing import Any

_strategy: Any = None


def remember_connected(strategy: Any) -> None:
    """Make `strategy` the one of this process. Call once it is connected to its cluster."""
    global _strategy
    _strategy = strategy


def connected_strategy() -> Any:
    """Return the `ParameterServerStrategy` of this process, None before it is connected."""
    return _strategy
