"""What runs where: the compute phase on the worker's GPU, variables and their updates on the ps's
CPU. What the tasks' own logs say about each operation is believed, not process ids, which a
container hides from `nvidia-smi`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kerasps.cluster.processes.gpus import visible_gpus
from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("placed_training.py")
PS_CPU = "/job:ps/replica:0/task:0/device:CPU:0"
MIB_OF_A_CUDA_CONTEXT = 100

pytestmark = [pytest.mark.timeout(240), pytest.mark.gpu]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    env = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "0"}
    env.pop("TF_FORCE_GPU_ALLOW_GROWTH", None)  # kerasps sees to it
    process = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("logs"))],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=230,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, process.stdout[-2000:] + process.stderr[-4000:]
    return json.loads(lines[0].removeprefix("REPORT "))


def test_the_worker_alone_has_the_gpu(report):
    gpus = [device for device in report["devices"] if "GPU" in device]
    assert gpus, (
        "TensorFlow finds no GPU in the worker: `pip install '.[gpu]'` has the CUDA libraries"
    )
    assert all(device.startswith("/job:worker/") for device in gpus), gpus
    assert PS_CPU in report["devices"]


def test_the_compute_phase_runs_on_the_workers_device(report):
    device = "/job:worker/replica:0/task:0/device:GPU:0"
    assert report["worker"]["MatMul"] == [device]
    assert report["worker"]["TanhGrad"] == [device]


def test_variables_and_their_updates_are_on_the_ps(report):
    assert report["variables"] == [PS_CPU]
    assert report["ps"]["AssignAddVariableOp"] == [PS_CPU]
    assert {device for devices in report["ps"].values() for device in devices} == {PS_CPU}
    assert "MatMul" not in report["ps"]
    # A worker places the whole execution, but for the push, which is a function of the ps.
    assert "AssignAddVariableOp" not in report["worker"]


def test_training_equals_plain_keras(report):
    assert report["learned"] > 0.05
    assert report["difference"] < 1e-4


@pytest.mark.gpu(number=2)
def test_a_worker_uses_all_gpus():
    script = SCRIPT.parents[1] / "processes/several_devices.py"
    visible = ",".join(visible_gpus(os.environ)[:2])
    report = run_and_report(script, "gpus", forked=False, CUDA_VISIBLE_DEVICES=visible)
    assert report["devices"] == ["GPU:0", "GPU:1"]
    assert report["sgd"]["moved"] > 0.01
    assert report["sgd"]["weights"] < 1e-4


def test_memory_grows_with_use(report):
    used_before, total, used_after = report["memory"]
    taken = used_after - used_before
    assert taken > MIB_OF_A_CUDA_CONTEXT, "the worker took no memory: nothing ran on the GPU"
    assert taken < 0.5 * (total - used_before), "the worker took the GPU's memory whole"
