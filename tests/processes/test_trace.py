"""Traces of a training that loses a worker, and from another process."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("traced_training.py")


def processes_in(file):
    events = json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]
    return [event["args"]["name"] for event in events if event["name"] == "process_name"]


def test_a_worker_that_is_lost_meanwhile_is_said_to_be_missing(tmp_path):
    report = run_and_report(SCRIPT, "lost", tmp_path)
    assert report["missing"] == ["worker 1"]
    assert "worker 1 is missing: " in report["said"]
    assert report["steps"] > 50
    names = [name for name in processes_in(report["file"]) if "missing" in name]
    assert [name.partition(" (")[0] for name in names] == ["worker 1"]


def test_the_command_traces_a_training_that_runs(tmp_path):
    report = run_and_report(SCRIPT, "attached", tmp_path)
    assert report["code"] == 0
    said = [line for line in report["err"].splitlines() if line.startswith("kerasps trace: ")]
    assert said[0].endswith("tasks record for 1 s.")
    assert said[1].startswith("kerasps trace: waiting for the recordings")
    match = re.fullmatch(r"Trace of (\d+) steps: (.*\.json\.gz)\. Worker \d .*%.*\n", report["out"])
    assert match, report["out"]
    assert int(match[1]) > 10
    assert len(processes_in(match[2])) == 4


def run_command(tmp_path, *arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "kerasps", "trace", "--log-dir", str(tmp_path), *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def test_without_a_training_the_command_says_what_it_needs(tmp_path):
    done = run_command(tmp_path, str(os.getpid()))
    assert done.returncode == 1
    assert f"Received: {os.getpid()}, which runs." in done.stderr
    done = run_command(tmp_path, "--seconds", "61")
    assert (done.returncode, "60 seconds at most" in done.stderr) == (2, True)


def test_a_cluster_that_is_not_there_is_an_error(tmp_path):
    cluster = {job: ["127.0.0.1:1"] for job in ("chief", "worker", "ps")}
    cluster = {job: [f"127.0.0.1:{i}"] for i, job in enumerate(cluster, 1)}
    config = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    done = run_command(tmp_path, "--seconds", "0.1", TF_CONFIG=json.dumps(config))
    assert done.returncode == 1
    assert "No task has recorded anything." in done.stderr
    assert list(tmp_path.iterdir()) == []
