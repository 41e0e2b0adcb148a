"""Tasks and script under a process manager that restarts what fails: here, a loop of a shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from support.process_checks import (
    marked_environment,
    marked_processes,
    reserved_address,
)
from support.runs import ToldTraining

TRAINING = Path(__file__).with_name("restarted_training.py")
# All that systemd's `Restart=on-failure` does, or Kubernetes's `restartPolicy: OnFailure`.
ON_FAILURE = 'until "$@"; do sleep 0.1; done'
TASKS = {"chief": 1, "worker": 1, "ps": 2}


@pytest.fixture
def start(tmp_path):
    """Starts a task in a loop, and ends with nothing left behind."""
    mark = str(uuid.uuid4())
    reserved = {job: [reserved_address() for _ in range(count)] for job, count in TASKS.items()}
    cluster = {job: [address for _, address in found] for job, found in reserved.items()}
    started = []

    def start_task(job, index, *command):
        env = marked_environment(
            mark,
            tmp_path,
            TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}),
            TF_CPP_MIN_LOG_LEVEL="3",
            KERAS_BACKEND="tensorflow",
        )
        with (tmp_path / f"{job}-{index}.log").open("w") as log:
            started.append(
                subprocess.Popen(
                    ["bash", "-c", ON_FAILURE, "_", sys.executable, *command],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
        return started[-1]

    def tasks():
        return {name: pid for pid, name in marked_processes(mark).items()}

    start_task.tasks = tasks
    yield start_task
    for process in started:
        process.kill()
        process.wait()
    for pid in marked_processes(mark):
        os.kill(pid, signal.SIGKILL)
    for found in reserved.values():
        for holder, _ in found:
            holder.close()


def test_a_run_survives_a_ps_a_worker_and_its_coordinator(start, tmp_path):
    epochs, steps = 5, 20
    loops = [
        start(job, index, "-m", "kerasps", "serve")
        for job in ("worker", "ps")
        for index in range(TASKS[job])
    ]
    script = start("chief", 0, str(TRAINING), str(tmp_path), str(epochs), str(steps))

    told = ToldTraining(
        tmp_path,
        lambda: script.poll() is not None,
        (tmp_path / "chief-0.log").read_text,
    )
    told.wait_for_epoch(1)
    os.kill(start.tasks()["ps-1"], signal.SIGKILL)
    told.wait_for_epoch(2)
    os.kill(start.tasks()["worker-0"], signal.SIGKILL)
    told.wait_for_epoch(3)
    os.kill(told.events("started")[-1]["pid"], signal.SIGKILL)
    assert script.wait() == 0
    told.check_exact(epochs * steps, starts=len(told.events("started")))
    # A backup is written beside the training: of the epoch that has ended just now, or the one
    # before.
    begun = [event["epoch"] for event in told.events("epoch")]
    assert [*dict.fromkeys(begun)] == list(range(epochs))
    assert len(begun) <= epochs + 4
    # A task that is asked to end has not failed, and its manager leaves it.
    for name, pid in start.tasks().items():
        if name.startswith(("ps-", "worker-")):
            os.kill(pid, signal.SIGTERM)
    assert [loop.wait() for loop in loops] == [0, 0, 0]
    assert start.tasks() == {}
