"""A session with one worker: training must equal plain Keras, so every test compares the two in
this process.

A process connects once, so what differs between sessions comes from the environment:
KERASPS_TEST_NUM_PS, KERASPS_TEST_SHARD_LAYOUT, KERASPS_TEST_SPARSE_UPDATES and KERASPS_TEST_DEVICE,
the device of the worker that computes. How variables are split is for a test to choose, with
`sharded`.
"""

from __future__ import annotations

import contextlib
import os

import pytest

import kerasps
from support.partitioner import Partitioner

PARTITIONER = Partitioner()


@pytest.fixture(scope="session")
def strategy():
    num_ps = int(os.environ.get("KERASPS_TEST_NUM_PS", "2"))
    device = os.environ.get("KERASPS_TEST_DEVICE")
    with kerasps.LocalCluster(num_workers=1, num_ps=num_ps) as cluster:
        yield kerasps.ParameterServerStrategy(
            cluster.cluster_resolver,
            PARTITIONER,
            shard_layout=os.environ.get("KERASPS_TEST_SHARD_LAYOUT", "mod"),
            sparse_updates=os.environ.get("KERASPS_TEST_SPARSE_UPDATES", "lazy"),
            # The tables of these tests are small; see `processes/test_small_tables.py` for others.
            table_min_bytes=0,
            worker_devices=None if device is None else [device],
        )


@pytest.fixture
def sharded():
    """Splits every variable of at least 512 bytes into so many shards, from the call to the end of
    the test.
    """

    def choose(num_shards, min_bytes=512):
        PARTITIONER.chosen = kerasps.FixedShardsPartitioner(num_shards, min_bytes=min_bytes)

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, PARTITIONER, "chosen", None)
        yield choose
