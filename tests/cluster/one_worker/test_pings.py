"""Servers that kerasps starts accept any number of pings, so a call may wait for hours."""

from __future__ import annotations

import pytest
import tensorflow as tf

from kerasps import _compat
from kerasps.runtime.probe import limits_pings
from support.process_checks import EVER_S


@pytest.mark.parametrize("job", ["localhost", "worker", "ps"])
def test_a_server_of_the_cluster_accepts_any_number_of_pings(strategy, job):
    jobs = _compat.eager_context().get_server_def().cluster.job
    addresses = [address for of in jobs if of.name == job for address in of.tasks.values()]
    assert addresses
    assert [address for address in addresses if limits_pings(address, EVER_S)] == []


def test_a_server_of_tensorflow_limits_them(strategy):
    server = tf.distribute.Server({"other": ["127.0.0.1:0"]}, job_name="other", task_index=0)
    assert limits_pings(server.target.removeprefix("grpc://"), EVER_S)
