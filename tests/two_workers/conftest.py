"""A session with two workers and three ps; variables of 100 kB and more are in two shards."""

from __future__ import annotations

import pytest

import kerasps


@pytest.fixture(scope="session")
def strategy():
    with kerasps.LocalCluster(num_workers=2, num_ps=3) as cluster:
        yield kerasps.ParameterServerStrategy(cluster.cluster_resolver, kerasps.FixedShardsPartitioner(2, min_bytes=100_000))
