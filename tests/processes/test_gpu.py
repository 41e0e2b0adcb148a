"""What runs where: the compute phase on the worker's GPU if it has one, variables and their updates
on the ps's CPU.

What the tasks' own logs say about each operation is believed, not process ids, which a container
hides from `nvidia-smi`. The same is asked of a worker that is shown no GPU, everywhere, so that the
questions themselves are known to work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kerasps.cluster.gpus import visible_gpus
from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("placed_training.py")
PS_CPU = "/job:ps/replica:0/task:0/device:CPU:0"
MIB_OF_A_CUDA_CONTEXT = 100

GPUS = visible_gpus(os.environ)  # asks the driver, and does not import TensorFlow
NO_GPU = not GPUS
ON_GPU = pytest.param(
    "GPU",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(NO_GPU, reason="neither nvidia-smi nor the driver's /proc lists a GPU"),
    ],
)

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", params=["CPU", ON_GPU])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def report(kind, tmp_path_factory):
    env = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "0"}
    env.pop("TF_FORCE_GPU_ALLOW_GROWTH", None)  # kerasps sees to it
    if kind == "CPU":
        env["CUDA_VISIBLE_DEVICES"] = "-1"
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


def test_the_worker_alone_has_the_gpu(report, kind):
    gpus = [device for device in report["devices"] if "GPU" in device]
    if kind == "GPU":
        assert gpus, (
            "TensorFlow finds no GPU in the worker: `pip install kerasps[gpu]` brings the CUDA "
            "libraries"
        )
        assert all(device.startswith("/job:worker/") for device in gpus), gpus
    else:
        assert gpus == []
    assert PS_CPU in report["devices"]


def test_the_compute_phase_runs_on_the_workers_device(report, kind):
    device = f"/job:worker/replica:0/task:0/device:{kind}:0"
    assert report["worker"]["MatMul"] == [device]
    assert report["worker"]["TanhGrad"] == [device]


def test_variables_and_their_updates_are_on_the_ps(report):
    assert report["variables"] == [PS_CPU]
    assert report["ps"]["AssignAddVariableOp"] == [PS_CPU]
    assert {device for devices in report["ps"].values() for device in devices} == {PS_CPU}
    assert "MatMul" not in report["ps"]
    # A worker places the whole execution, but for the push, which is a function of the ps.
    assert "AssignAddVariableOp" not in report["worker"]


def test_training_equals_plain_keras(report, kind):
    assert report["learned"] > 0.05
    assert (
        report["difference"] < {"CPU": 1e-5, "GPU": 1e-2}[kind]
    )  # GPUs multiply in TensorFloat-32


@pytest.mark.gpu
@pytest.mark.skipif(len(GPUS) < 2, reason=f"this machine has {len(GPUS)} GPUs, and this takes two")
def test_a_worker_uses_all_gpus():
    script = SCRIPT.with_name("several_devices.py")
    visible = ",".join(GPUS[:2])
    report = run_and_report(script, "gpus", CUDA_VISIBLE_DEVICES=visible)
    assert report["devices"] == ["GPU:0", "GPU:1"]
    assert report["sgd"]["moved"] > 0.01
    assert report["sgd"]["weights"] < 1e-2  # GPUs multiply in TensorFloat-32


@pytest.mark.parametrize("kind", [ON_GPU], indirect=True)
def test_memory_grows_with_use(report):
    used_before, total, used_after = report["memory"]
    taken = used_after - used_before
    assert taken > MIB_OF_A_CUDA_CONTEXT, "the worker took no memory: nothing ran on the GPU"
    assert taken < 0.5 * (total - used_before), "the worker took the GPU's memory whole"
