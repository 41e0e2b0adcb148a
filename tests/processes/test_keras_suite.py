"""The runner of Keras's own tests: a crash of a file loses no more than it must."""

from __future__ import annotations

import argparse

import pytest

from support.keras_suite import load_runner

run = load_runner()


@pytest.mark.matrix
def test_a_file_that_ends_its_process_keeps_what_was_done_under_the_strategy(tmp_path):
    file = tmp_path / "crashing_test.py"
    file.write_text(
        "import os\n"
        "import keras\n"
        "def test_strategy():\n"
        "    keras.utils.clear_session()\n"
        "    assert '/job:ps' in keras.Variable(1.0).value.device\n"
        "def test_failing():\n"
        "    raise ValueError('first line\\nsecond')\n"
        "def test_ending():\n"
        "    os._exit(7)\n"
        "def test_after():\n"
        "    pass\n"
    )
    other = tmp_path / "other_test.py"  # of the same process, and reached by nobody before it ended
    other.write_text("def test_other():\n    pass\n")
    arguments = argparse.Namespace(num_ps=1, file_timeout=3600)
    outcomes = run.run_files([file, other], tmp_path, tmp_path / "output", arguments, num_workers=1)
    assert {test: outcome.outcome for test, outcome in outcomes.items()} == {
        "crashing_test.py::test_strategy": "passed",
        "crashing_test.py::test_failing": "failed",
        "other_test.py::test_other": "passed",
    }
    assert outcomes["crashing_test.py::test_failing"].reason == "ValueError: first line"


def test_a_file_that_does_not_end_is_ended(tmp_path, capsys):
    file = tmp_path / "hanging_test.py"
    file.write_text("import time\ndef test_hanging():\n    time.sleep(3600)\n")
    arguments = argparse.Namespace(num_ps=1, file_timeout=0.1)
    assert run.run_files([file], tmp_path, tmp_path / "output", arguments, num_workers=0) == {}
    assert "no end within 0.1 s" in capsys.readouterr().err
