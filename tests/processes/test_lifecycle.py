"""A process and its strategy: what was made before it, tries that fail, a second strategy, and the
end.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from support.process_checks import (
    IGNORED_WARNINGS,
    marked_environment,
    marked_processes,
    report_in,
    temporary_files,
    wait_for,
)

SCRIPT = Path(__file__).with_name("lifecycle.py")


@pytest.fixture(scope="module")
def report(once, tmp_path_factory):
    """What one process found in all its life, which ended without closing its cluster; warnings
    were errors.
    """
    return once("lifecycle", lambda: run(tmp_path_factory))


def run(tmp_path_factory):
    directory, mark = tmp_path_factory.mktemp("lifecycle"), str(uuid.uuid4())
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-W",
            "ignore::DeprecationWarning",
            *itertools.chain.from_iterable(("-W", ignored) for ignored in IGNORED_WARNINGS),
            str(SCRIPT),
            str(directory),
        ],
        # Python drops an option that PYTHONWARNINGS has too, which comes before `error` then.
        env=marked_environment(
            mark,
            directory,
            KERAS_BACKEND="tensorflow",
            TF_CPP_MIN_LOG_LEVEL="3",
            PYTHONWARNINGS="",
        ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    wait_for(lambda: marked_processes(mark) == {}, what="the end of the tasks")
    assert temporary_files(directory) == []
    assert "Warning" not in done.stderr
    assert "non-existent function" not in done.stderr
    return report_in(done)


def test_what_was_made_before_the_strategy_lives_on(report):
    assert report["wrong"] == {}


def test_what_cannot_live_on_is_named(report):
    (warning,) = report["warnings"]
    assert (
        "Connecting to the cluster ended objects that TensorFlow finds by name and kerasps cannot "
        "make again." in warning
    )
    assert re.search(
        r"Received, made before the strategy: queue '\w+'\. Make the strategy first, then these\.$",
        warning,
    )


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        ("config", "ClusterConfigError", r"has no ps\. Expected: "),
        (
            "unreachable",
            "TaskUnreachableError",
            r"Received: ps 0 at 127\.0\.0\.1:\d+ \(Connection refused\)",
        ),
        (
            "port",
            "TaskStartError",
            r"port of the chief, 127\.0\.0\.1:(\d+), is in use.*`ss -ltnp 'sport = :\1'`",
        ),
        (
            "foreign",
            "TaskUnreachableError",
            r"could not set up the tasks of the cluster\. Expected: a server of this version",
        ),
        (
            "foreign again",
            "TaskUnreachableError",
            r"(?s)could not set up the tasks.*make the strategy again\.$",
        ),
    ],
)
def test_a_try_that_fails_says_why_and_leaves_the_process_able_to_try_again(
    report, attempt, error, message
):
    assert report["errors"][attempt][0] == error
    assert re.search(message, report["errors"][attempt][1])


def test_a_second_strategy_for_the_same_cluster_is_the_first(report):
    assert report["same"] == [True, True, True, True]
    assert report["repr"] == "<ParameterServerStrategy num_workers=1 num_ps=1>"
    assert report["ps_bytes"] > 0


@pytest.mark.parametrize(
    ("attempt", "argument", "expected", "received"),
    [
        ("no partitioner", "variable_partitioner", r"MinSizePartitioner\(.*4096.*\)", "None"),
        (
            "other partitioner",
            "variable_partitioner",
            r"MinSizePartitioner\(.*4096.*\)",
            r"MinSizePartitioner\(.*8192.*\)",
        ),
        ("other layout", "shard_layout", "'mod'", "'div'"),
        ("other updates", "sparse_updates", "'lazy'", "'dense'"),
    ],
)
def test_a_second_strategy_with_another_argument_is_refused_by_its_name(
    report, attempt, argument, expected, received
):
    kind, message = report["errors"][attempt]
    assert kind == "ValueError"
    assert re.search(
        rf"`{argument}` differs.*Expected: {argument}={expected}, which.*"
        rf"Received: {argument}={received}\.",
        message,
    )


def test_another_cluster_is_refused_with_what_to_do(report):
    kind, message = report["errors"]["other cluster"]
    assert kind == "KeraspsError"
    assert re.search(
        r"connected to a cluster already.*Expected: .*chief at 127.*Received: chief at 127", message
    )
    assert "in a notebook, make the cluster in a separate cell that runs once" in message
