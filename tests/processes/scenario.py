"""What the scripts of this folder share: a strategy on a cluster of its own, the report of it, and
who kills its workers.

A script imports this module first: then it finds `support`, as the tests of pytest do.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
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


class Killer(threading.Thread):
    """Kills workers and starts them again, at random times.

    Args:
        cluster: the `LocalCluster`.
        chance: a `random.Random`.
        most_between: seconds between two kills at most.
        most_away: seconds that a worker is away at most; half of them come back at once.
    """

    def __init__(self, cluster, chance, *, most_between=4, most_away=2):
        super().__init__(daemon=True)
        self._cluster = cluster
        self._chance = chance
        self._most_between, self._most_away = most_between, most_away
        self.is_over = threading.Event()
        self.kills = 0

    def run(self):
        while not self.is_over.wait(self._chance.uniform(0.05, self._most_between)):
            worker = self._chance.randrange(2)
            self._cluster.kill("worker", worker)
            self.kills += 1
            time.sleep(self._chance.choice([0, self._chance.uniform(0, self._most_away)]))
            self._cluster.restart("worker", worker)
