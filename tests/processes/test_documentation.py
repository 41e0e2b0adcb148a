"""Every example of the README and of public docstrings runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.documentation import examples
from support.process_checks import marked_environment, run_script

SCRIPT = Path(__file__).with_name("documentation_examples.py")


def test_every_example_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(SCRIPT), str(tmp_path)],
        env=marked_environment(
            "documentation", tmp_path, KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3"
        ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"^ran (\w+) in", done.stdout, re.MULTILINE)
    assert sorted(ran) == sorted(name for name, blocks in examples().items() for _ in blocks)


@pytest.mark.matrix
def test_what_the_documentation_of_tensorflow_shows_runs(tmp_path):
    script = Path(__file__).with_name("tensorflow_documentation.py")
    env = marked_environment(
        "tensorflow", tmp_path, KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3"
    )
    done = run_script(script, tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ran (\w+)$", done.stdout, re.MULTILINE)) == len(
        re.findall(r"^@example$", script.read_text(), re.MULTILINE)
    )
