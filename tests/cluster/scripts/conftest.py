"""A session with two workers and two ps for all scripts, each of which gets the one strategy of its
process.

Whether variables are split is for each script to say.
"""

from __future__ import annotations

import keras
import pytest

import kerasps
from support import scripts


@pytest.fixture(scope="session")
def cluster():
    with kerasps.LocalCluster(num_workers=2, num_ps=2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def as_a_new_process():
    """What a script sets for its whole process ends with it, also where the script fails."""
    yield
    scripts.PARTITIONER.chosen = None
    keras.config.set_dtype_policy("float32")
    keras.config.enable_traceback_filtering()
