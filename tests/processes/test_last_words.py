"""A script that fails ends in its own error, told once: nothing that TensorFlow says about it comes
behind.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.process_checks import marked_environment

SCRIPT = Path(__file__).with_name("failing_training.py")
WORKER = r"Raised on worker [01] at 127\.0\.0\.1:\d+\."
# Its words may be those of a lost worker, so the steps are tried on workers that answer.
TRIED = (
    r"This error came 3 times for the same steps \(from step \d+ on\), and the worker answered "
    r"each time\. So they are not tried again\.\n"
)


def stderr_of(way, tmp_path, *, launched=False):
    """What the script says on stderr when it fails in this way."""
    launch = ["-m", "kerasps", "launch", "--num-workers", "2", "--num-ps", "2"] if launched else []
    process = subprocess.run(
        [sys.executable, *launch, str(SCRIPT), way, str(tmp_path / "logs")],
        # With all that TensorFlow has to say.
        env={
            **marked_environment(way, tmp_path, KERAS_BACKEND="tensorflow"),
            "TF_CPP_MIN_LOG_LEVEL": "0",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1, process.stderr
    return process.stderr


@pytest.mark.parametrize(
    ("way", "launched", "words", "last_lines"),
    [
        pytest.param(
            *("step", False, "the values are too large"),
            r"\nIn operation '.*checking.*'\.\n" + WORKER,
            marks=pytest.mark.matrix,
        ),
        ("data", True, "a bad row", r"\nIn operation '.*'\.\n" + TRIED + WORKER),
        pytest.param("input", True, "The input never ends", "", marks=pytest.mark.matrix),
        pytest.param("script", True, "the script's own error", "", marks=pytest.mark.matrix),
        ("ps", False, r"ps 1 at 127\.0\.0\.1:\d+ is gone", r" The ps's log says why it ended\."),
    ],
)
def test_the_last_lines_of_a_script_that_fails_are_its_error(
    way, launched, words, last_lines, tmp_path
):
    check_last_lines(stderr_of(way, tmp_path, launched=launched), words, last_lines)


def test_a_script_ends_in_its_error_and_what_steps_printed_is_in_the_logs(tmp_path):
    check_last_lines(stderr_of("script", tmp_path), "the script's own error", "")
    logs = [(tmp_path / "logs" / f"worker-{worker}.log").read_text() for worker in range(2)]
    assert all("largest: 1" in log for log in logs)


def check_last_lines(stderr, words, last_lines):
    assert re.search(
        rf"^[\w.]*(Error|Lost)[\w.]*: .*{words}.*{last_lines}\Z", stderr.rstrip(), re.MULTILINE
    ), stderr
    error = stderr[stderr.rindex("Traceback (most recent call last)") :]
    assert "function_node" not in error
    assert len(re.findall(words, error)) == 1
    # What TensorFlow's C++ says of a lost task, and of an error in words of a lost task, is said
    # when it happens.
    if "ps" not in words and "row" not in words:
        assert len(re.findall(words, stderr)) == 1
