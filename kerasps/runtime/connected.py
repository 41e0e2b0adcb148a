"""The strategy of this process. TensorFlow connects a process once, so there is only one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kerasps.errors import ClusterClosedError

if TYPE_CHECKING:
    import tensorflow as tf


class Tasks(Protocol):
    """The tasks of a cluster, for messages."""

    @property
    def jobs(self) -> Mapping[str, tuple[str, ...]]:
        """The addresses (`"host:port"`) of the tasks of each job."""


class ClusterHost(Protocol):
    """The part of a strategy that errors of lost tasks use: its cluster and the state of its ps.

    Attributes:
        description: the tasks of the cluster.
        after_ps_loss: the advice in the error about a lost ps: a sentence or two.
    """

    description: Tasks
    after_ps_loss: str

    @property
    def num_ps(self) -> int:
        """The number of ps tasks."""

    def hangs(self, ps: int) -> bool:
        """Return True if a ps counts as lost because it does not answer."""


_strategy: Any = None
# A clause that says what closed the cluster of the strategy, and where; None while it is open.
_closed: str | None = None


def remember_connected(strategy: tf.distribute.ParameterServerStrategy) -> None:
    """Make `strategy` that of this process. Call once it is connected to its cluster."""
    global _strategy
    _strategy = strategy


def connected_strategy() -> Any:
    """Return the `ParameterServerStrategy` of this process, None before it is connected."""
    return _strategy


def connected_host() -> ClusterHost | None:
    """Return the host of the strategy of this process, None before it is connected."""
    if _strategy is None:
        return None
    host: ClusterHost = _strategy.extended.host
    return host


def note_closed(how: str) -> None:
    """Record that the strategy's cluster is closed on purpose. Call before its tasks end."""
    global _closed
    _closed = how


def closed_error(received: str = "a use of the cluster") -> ClusterClosedError | None:
    """Return the error for a use of the closed cluster; None if no cluster was closed."""
    if _closed is None:
        return None
    return ClusterClosedError(
        "The cluster that this process was connected to is closed, and the variables on it are "
        f"gone: {_closed}. Expected: the strategy, its models and their variables in use while the "
        f"cluster is open. Received: {received} after that. Save the model before the cluster is "
        "closed, inside its `with` block; afterwards load the file outside of `strategy.scope()`, "
        "and continue with plain Keras. TensorFlow connects a process once: to train on a cluster "
        "again, start another process (in a notebook, restart the kernel)."
    )


def check_not_closed(received: str = "a use of the cluster") -> None:
    """Raise `ClusterClosedError` if the cluster of this process is closed."""
    error = closed_error(received)
    if error is not None:
        raise error
