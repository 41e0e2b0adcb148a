"""What the scripts of this folder share: a strategy on a cluster of its own, and the report of it.

A script imports this module first: then it finds `support`, as the tests of pytest do.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import kerasps

sys.path.append(str(Path(__file__).parents[1]))


@contextlib.contextmanager
def local_strategy(num_workers=2, num_ps=2, *, shards=None, partitioner=None, **arguments):
    """Gives a new cluster, and a strategy on it; `shards` is how many a variable has at most."""
    if shards is not None:
        partitioner = kerasps.FixedShardsPartitioner(shards, min_bytes=0)
    with kerasps.LocalCluster(num_workers, num_ps) as cluster:
        yield (
            cluster,
            kerasps.ParameterServerStrategy(cluster.cluster_resolver, partitioner, **arguments),
        )


def print_report(report):
    """Prints what `run_and_report` returns: a line of JSON."""
    print("REPORT " + json.dumps(report), flush=True)
