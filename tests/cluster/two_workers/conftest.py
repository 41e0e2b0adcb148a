"""A session with two workers, or as many as KERASPS_TEST_NUM_WORKERS says, and three ps; large
variables are in two shards.
"""

from __future__ import annotations

import os

import pytest

import kerasps


@pytest.fixture(scope="session")
def strategy():
    num_workers = int(os.environ.get("KERASPS_TEST_NUM_WORKERS", "2"))
    with kerasps.LocalCluster(num_workers=num_workers, num_ps=3) as cluster:
        yield kerasps.ParameterServerStrategy(
            cluster.cluster_resolver,
            kerasps.FixedShardsPartitioner(2, min_bytes=100_000),
            table_min_bytes=0,
        )
