"""A session with a cluster inside this process: two workers, two ps and the coordinator."""

from __future__ import annotations

import pytest
import tensorflow as tf

import kerasps
from support.partitioner import Partitioner
from support.process_checks import reserved_address
from support.wrappers import Wrappers

NUM_WORKERS, NUM_PS = 2, 2


PARTITIONER = Partitioner()


@pytest.fixture(scope="session")
def wrappers():
    """Wrappers around methods of Keras and TensorFlow, which were there before the strategy."""
    wrappers = Wrappers()
    wrappers.put_on()
    return wrappers


@pytest.fixture(scope="session")
def strategy(wrappers):
    """The strategy of the cluster inside this process."""
    holders, addresses = zip(
        *(reserved_address() for _ in range(NUM_WORKERS + NUM_PS)), strict=True
    )
    # As TensorFlow's guide has it: no chief is named, so this process takes a port.
    spec = tf.train.ClusterSpec({"ps": [*addresses[:NUM_PS]], "worker": [*addresses[NUM_PS:]]})
    # Servers in one process share its threads. A step holds one while it waits for its worker, so
    # with fewer threads than workers and one, nobody is left to answer.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=NUM_WORKERS + 2)
    servers = [
        tf.distribute.Server(spec, job_name=job, task_index=index, protocol="grpc", config=config)
        for job in ("ps", "worker")
        for index in range(spec.num_tasks(job))
    ]
    for holder in holders:
        holder.close()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    connected = kerasps.ParameterServerStrategy(resolver, PARTITIONER, table_min_bytes=0)
    # The same cluster, whose chief has the same port.
    assert kerasps.ParameterServerStrategy(resolver, PARTITIONER, table_min_bytes=0) is connected
    yield connected
    del servers


@pytest.fixture
def sharded():
    """Split every variable of at least 512 bytes into so many shards, to the end of the test."""

    def choose(num_shards, min_bytes=512):
        PARTITIONER.chosen = kerasps.FixedShardsPartitioner(num_shards, min_bytes=min_bytes)

    yield choose
    PARTITIONER.chosen = None
