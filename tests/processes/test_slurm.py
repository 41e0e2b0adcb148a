"""`deploy/slurm/train.sbatch`, with a stand-in for `srun` that starts tasks as Slurm does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from support.process_checks import marked_environment, marked_processes, wait_for

SBATCH = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("-"):
    command.pop(0)
count = int(os.environ["SLURM_NTASKS"])
step = {{
    "SLURM_STEP_NUM_TASKS": str(count),
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_TASKS_PER_NODE": str(count),
    "SLURM_STEP_ID": "0",
}}
tasks = [
    subprocess.Popen(command, env={{**os.environ, **step, "SLURM_PROCID": str(rank)}})
    for rank in range(count)
]
codes = [task.wait() for task in tasks]
# 128 and the number of the signal, as a shell has it.
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
KERASPS = f"""#!/bin/sh
exec {sys.executable} -m kerasps "$@"
"""
SCONTROL = """#!/bin/sh
echo "$@" >> "$SLURM_SUBMIT_DIR/scontrol"
"""
TRAINS = """
import keras, numpy, kerasps
strategy = kerasps.ParameterServerStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(numpy.ones((8, 1)), numpy.ones(8), batch_size=4, verbose=0)
print("STEPS", int(model.optimizer.iterations), flush=True)
"""


@pytest.fixture
def sbatch(tmp_path):
    """Starts the batch script with a training script; nothing is left of it."""
    mark = str(uuid.uuid4())
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("kerasps", KERASPS), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    started = []

    def start(script, **variables):
        (tmp_path / "train.py").write_text(script)
        env = marked_environment(
            mark,
            tmp_path,
            PATH=f"{programs}:{os.environ['PATH']}",
            TF_CPP_MIN_LOG_LEVEL="3",
            KERAS_BACKEND="tensorflow",
            SLURM_JOB_ID=str(random.SystemRandom().randrange(1, 10**6)),
            SLURM_NTASKS="3",
            NUM_PS="1",
            SLURM_SUBMIT_DIR=str(tmp_path),
            **variables,
        )
        with (tmp_path / "log").open("w") as log:
            started.append(
                subprocess.Popen(
                    ["bash", str(SBATCH), "train.py"],
                    env=env,
                    cwd=tmp_path,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    left = marked_processes(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == {}


def test_a_batch_job_trains_and_ends(sbatch, tmp_path):
    process = sbatch(TRAINS)
    assert process.wait() == 0, (tmp_path / "log").read_text()
    assert "STEPS 2\n" in (tmp_path / "log").read_text()
    assert not (tmp_path / "scontrol").exists()
    assert not [*tmp_path.glob("*.code")]


def test_an_error_of_the_script_ends_the_job_for_good(sbatch, tmp_path):
    assert sbatch("raise SystemExit(7)").wait() == 7, (tmp_path / "log").read_text()
    assert not (tmp_path / "scontrol").exists()


@pytest.mark.parametrize("before", [pytest.param(0, marks=pytest.mark.matrix), 10])
def test_a_chief_that_was_told_to_end_is_tried_again_so_often(sbatch, tmp_path, before):
    process = sbatch("raise SystemExit(143)", SLURM_RESTART_COUNT=str(before))
    assert process.wait() == 143, (tmp_path / "log").read_text()
    assert (tmp_path / "scontrol").exists() == (before < 10)


def test_a_job_whose_time_is_over_goes_into_the_queue_while_it_runs(sbatch, tmp_path):
    process = sbatch(
        "import os, pathlib, time\n"
        "pathlib.Path('runs').touch()\n"
        "while not os.path.exists('end'): time.sleep(0.1)"
    )
    wait_for((tmp_path / "runs").exists, what="the script to run")
    process.send_signal(signal.SIGUSR1)
    wait_for((tmp_path / "scontrol").exists, what="the job to be put into the queue")
    assert process.poll() is None
    (tmp_path / "end").touch()
    assert process.wait() == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "scontrol").read_text().startswith("requeue ")
