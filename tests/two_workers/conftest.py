"""A session with two workers and two ps."""

from __future__ import annotations

import pytest

import kerasps


@pytest.fixture(scope="session")
def strategy():
    with kerasps.LocalCluster(num_workers=2, num_ps=2) as cluster:
        yield kerasps.ParameterServerStrategy(cluster.cluster_resolver)
