"""A session with one worker: training must equal plain Keras, so every test compares the two in this process."""

from __future__ import annotations

import os

import pytest

import kerasps


@pytest.fixture(scope="session")
def strategy():
    num_ps = int(os.environ.get("KERASPS_TEST_NUM_PS", "2"))
    with kerasps.LocalCluster(num_workers=1, num_ps=num_ps) as cluster:
        yield kerasps.ParameterServerStrategy(cluster.cluster_resolver)
