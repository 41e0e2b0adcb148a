"""A pytest plugin: notes the outcome of each test, and gives the session a kerasps strategy as its
global default.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest


def pytest_addoption(parser):
    group = parser.getgroup("keras suite")
    group.addoption(
        "--outcomes", help="the file that a line of JSON is added to for each test, when it is done"
    )
    group.addoption(
        "--num-workers", type=int, default=0, help="workers of the cluster; 0: plain Keras"
    )
    group.addoption("--num-ps", type=int, default=2)


def pytest_sessionstart(session):
    config = session.config
    session.outcomes = Path(config.getoption("outcomes"))
    session.stand_ins = _stand_in_for_missing_modules()
    if not config.getoption("num_workers"):
        return
    import tensorflow as tf

    import kerasps

    session.cluster = kerasps.LocalCluster(
        config.getoption("num_workers"), config.getoption("num_ps")
    )
    session.strategy = kerasps.ParameterServerStrategy(session.cluster.cluster_resolver)
    tf.distribute.experimental_set_strategy(session.strategy)


def pytest_collection_finish(session):
    # Libraries ask whether jax has been imported, so it must not stay longer than it takes to
    # import the tests.
    for name in session.stand_ins:
        del sys.modules[name]


def pytest_sessionfinish(session):
    if hasattr(session, "cluster"):
        session.cluster.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    session = item.session
    if report.when == "call" and report.passed and hasattr(session, "strategy"):
        import tensorflow as tf

        if tf.distribute.get_strategy() is not session.strategy:
            report.outcome, report.longrepr = (
                "failed",
                "The strategy was not current at the end of the test.",
            )
    # One line per test: what its call came to, or the part before or after it that failed or was
    # skipped. Written at once, so that a crash loses no more than the test that it was in.
    if report.when == "call" or not report.passed:
        error = (
            call.excinfo.exconly()
            if report.failed and call.excinfo
            else report.longrepr
            if report.failed
            else ""
        )
        with session.outcomes.open("a", encoding="utf-8") as stream:
            stream.write(
                json.dumps({"test": item.nodeid, "outcome": report.outcome, "error": str(error)})
                + "\n"
            )
    return report


def _stand_in_for_missing_modules():
    """Lets the test files be imported: some import Keras's `conftest.py`, which is not in the
    wheel, and one imports jax.

    A test that uses jax then fails, under plain Keras too, and so does not count; install jax to
    count it.
    """
    from keras import backend

    conftest = types.ModuleType("conftest")
    conftest.skip_if_backend = lambda given, reason: pytest.mark.skipif(
        backend.backend() == given, reason=reason
    )
    stand_ins = {"conftest": conftest}
    if importlib.util.find_spec("jax") is None:
        stand_ins["jax"] = types.ModuleType("jax")
    sys.modules.update(stand_ins)
    return stand_ins
