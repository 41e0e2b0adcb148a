"""Where an example trains: on the cluster that TF_CONFIG names, or else on one that it starts on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import kerasps


@contextlib.contextmanager
def strategy(num_workers: int = 2, num_ps: int = 1) -> Iterator[kerasps.ParameterServerStrategy]:
    """Yields the strategy; `kerasps launch` sets TF_CONFIG, `python example.py` does not."""
    if "TF_CONFIG" in os.environ:
        yield kerasps.ParameterServerStrategy()
        return
    with kerasps.LocalCluster(num_workers=num_workers, num_ps=num_ps) as cluster:
        yield kerasps.ParameterServerStrategy(cluster.cluster_resolver)
