"""The cluster of an example: the one that TF_CONFIG describes, or else one on this machine."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator

import kerasps


@contextlib.contextmanager
def strategy(
    num_workers: int = 2, num_ps: int = 1, variable_partitioner: Callable[..., object] | None = None
) -> Iterator[kerasps.ParameterServerStrategy]:
    """Yield the strategy; `kerasps launch` sets TF_CONFIG, `python example.py` does not."""
    if "TF_CONFIG" in os.environ:
        is_worker = json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "worker"
        # With `kerasps launch --mode worker`, each worker runs the example.
        kind = kerasps.WorkerDrivenStrategy if is_worker else kerasps.ParameterServerStrategy
        yield kind(None, variable_partitioner)
        return
    with kerasps.LocalCluster(num_workers=num_workers, num_ps=num_ps) as cluster:
        yield kerasps.ParameterServerStrategy(cluster.cluster_resolver, variable_partitioner)
