"""For all sessions: the tests are in an order that follows from a seed, which is printed, no test
draws by the seed of another, and what several tests look at is made once.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import sys
from pathlib import Path

import pytest

from support.sessions import refuse_two_clusters

OPTION, VARIABLE = "--order-seed", "KERASPS_TEST_ORDER_SEED"


def pytest_addoption(parser):
    parser.addoption(
        OPTION,
        type=int,
        metavar="N",
        help="the seed that the order of the tests follows from; 0 for the order of the files",
    )


def pytest_configure(config):
    if not config.option.collectonly:
        folder = config.invocation_params.dir
        refuse_two_clusters([(folder / Path(a.partition("::")[0])).resolve() for a in config.args])
    # The processes of pytest-xdist inherit the environment: all must have the tests in one order.
    if config.getoption(OPTION) is None:
        drawn = str(random.SystemRandom().randrange(1, 1_000_000))
        config.option.order_seed = int(os.environ.setdefault(VARIABLE, drawn))


def pytest_report_header(config):
    return f"{OPTION}={config.getoption(OPTION)}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Shuffle the files, and the tests in each."""
    seed = config.getoption(OPTION)
    if not seed:
        return
    shuffled = random.Random(seed)
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    in_order = list(files.values())
    shuffled.shuffle(in_order)
    for tests in in_order:
        shuffled.shuffle(tests)
    items[:] = [item for tests in in_order for item in tests]


@pytest.fixture(autouse=True)
def no_seed_is_left():
    """`tf.random.set_seed` and `keras.utils.set_random_seed` are for the whole process, and make
    what is random in a dataset or a step less so.
    """
    yield
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(None)


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Makes something, of which there is one in a run, and returns it, as JSON has it.

    The tests of a file may be in both processes of pytest-xdist. Who comes second waits for what
    the first one makes.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def made_once(name, make):
        path, failure = folder / f"{name}.json", folder / f"{name}.failure"
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if failure.exists():
                pytest.fail(f"{name}, which another test made, failed: {failure.read_text()}")
            if not path.exists():
                try:
                    path.write_text(json.dumps(make()))
                except BaseException as exc:
                    failure.write_text(f"{type(exc).__name__}: {exc}")
                    raise
        return json.loads(path.read_text())

    return made_once
