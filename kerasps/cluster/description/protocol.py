"""`ClusterResolver`: the methods of a cluster resolver that a strategy calls.

TensorFlow has no type hints, so type checkers use this class for its resolvers.
"""

from __future__ import annotations

from typing import Any, Protocol


class ClusterResolver(Protocol):
    """The part of `tf.distribute.cluster_resolver.ClusterResolver` that a strategy uses.

    TensorFlow's resolvers implement it, and a class for another scheduler may:

    ```python
    class OfScheduler:
        task_type, task_id = "chief", 0

        def cluster_spec(self):
            return tf.train.ClusterSpec({"worker": ["host1:2222"], "ps": ["host2:2222"]})

    resolver: kerasps.ClusterResolver = OfScheduler()
    ```
    """

    @property
    def task_type(self) -> str | None:
        """The job of this process; None for the chief."""

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None for 0."""

    def cluster_spec(self) -> Any:
        """Return the `tf.train.ClusterSpec` with the tasks of each job."""
