"""Tests that take a GPU: `tox -e gpu`, or `pytest tests/gpu -v` where TensorFlow finds one.

They compare with plain Keras on the same GPU, in this process, without TensorFloat-32 and with
operations that give the same result each time. With KERASPS_TEST_REHEARSAL=1, and without a GPU,
those that can run take a second CPU device for one.
"""

from __future__ import annotations

import os

import pytest

from kerasps.cluster.processes.gpus import visible_gpus
from support.partitioner import Partitioner

PARTITIONER = Partitioner()
GPUS = visible_gpus(os.environ)  # asks the driver, and does not import TensorFlow
IS_REHEARSAL = bool(os.environ.get("KERASPS_TEST_REHEARSAL")) and not GPUS

# Before TensorFlow is imported, here and in the tasks.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
os.environ.setdefault("TF_DETERMINISTIC_OPS", "1")
os.environ.setdefault("TF_CUDNN_DETERMINISTIC", "1")
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")


def pytest_collection_modifyitems(items):
    """Skip what needs more GPUs than there are."""
    for item in items:
        marker = item.get_closest_marker("gpu")
        number = 1 if marker is None else marker.kwargs.get("number", 1)
        may_be_rehearsed = marker is None and IS_REHEARSAL
        if len(GPUS) < number and not may_be_rehearsed:
            reason = f"takes {number} GPU(s), and nvidia-smi or the driver's /proc list {len(GPUS)}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def strategy():
    """Two workers that share a GPU, and two ps. This process has the GPU too, for plain Keras."""
    import tensorflow as tf

    import kerasps

    if IS_REHEARSAL:
        os.environ["KERASPS_CPU_DEVICES"] = "2"
    tf.config.list_logical_devices()  # now TensorFlow has it, and keeps it
    with kerasps.LocalCluster(num_workers=2, num_ps=2) as cluster:
        strategy = kerasps.ParameterServerStrategy(
            cluster.cluster_resolver,
            PARTITIONER,
            table_min_bytes=0,
            worker_devices=["CPU:1"] if IS_REHEARSAL else None,
        )
        yield strategy


@pytest.fixture
def sharded(strategy):
    """Splits every variable of at least 512 bytes into so many shards, to the end of the test."""
    import kerasps

    def choose(num_shards, min_bytes=512):
        PARTITIONER.chosen = kerasps.FixedShardsPartitioner(num_shards, min_bytes=min_bytes)

    yield choose
    PARTITIONER.chosen = None
