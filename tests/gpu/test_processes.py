"""Workers with a GPU in clusters of their own: unlike workers, kills, many models, XLA, modes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.process_checks import run_and_report

pytestmark = pytest.mark.timeout(120)

SCRIPT = Path(__file__).with_name("gpu_training.py")
PLACED = Path(__file__).parents[1] / "processes/placed_steps.py"
IS_REHEARSAL = bool(os.environ.get("KERASPS_TEST_REHEARSAL"))
DEVICE = "CPU:1" if IS_REHEARSAL else "GPU:0"
# MiB that CUDA may take for a kernel that it loads late.
TOLERANCE = 64


def report_of(scenario, *command, **environment):
    paths = [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return run_and_report(*command, SCRIPT, scenario, forked=False, timeout_s=110, **environment)


@pytest.mark.parametrize("mode", ["async", "sync", "overlap"])
def test_the_compute_phase_is_on_the_gpu_in_each_mode(mode, tmp_path):
    report = run_and_report(
        PLACED, mode, tmp_path, forked=False, timeout_s=110, KERASPS_TEST_ACCELERATOR=DEVICE
    )
    assert report["devices"] == [DEVICE]
    training = report["graphs"]["steps"][0]
    assert {"MatMul", "TanhGrad"} <= set(training["compute"][DEVICE])
    assert not {"MatMul", "TanhGrad", "_FusedMatMul"} & set(training["compute"]["CPU:0"])
    assert training["others"] == []
    print(f"{mode}: {training['there']} tensors in, {training['back']} out of an execution")


def test_a_worker_without_a_gpu_takes_part():
    report = report_of("unlike_workers")
    assert report["devices"] == [[DEVICE], ["CPU:0"]]
    assert report["iterations"] == 401
    assert report["learned"]


def test_a_killed_worker_gives_its_memory_back_and_no_update_is_lost():
    report = report_of("killed")
    assert report["devices"] == [[DEVICE], [DEVICE]]
    assert report["examples"] == [3200.0, 3200.0]
    assert report["iterations"] == 4 * 400
    before, after = report["memory"]
    assert after <= before + TOLERANCE


def test_models_in_turn_leave_nothing_on_the_gpu():
    memory = report_of("lasting")["memory"]
    assert memory[-1] <= memory[4] + TOLERANCE


def test_xla_compiles_for_the_gpu():
    report = report_of("compiled", TF_DETERMINISTIC_OPS="0")  # which XLA does not promise
    assert report["difference"] < 1e-3


@pytest.mark.gpu
def test_a_worker_that_drives_its_own_steps_uses_its_gpu():
    cluster = ["--mode", "worker", "--num-workers", "1", "--num-ps", "1"]
    report = report_of("driven", "-m", "kerasps", "launch", *cluster)
    assert report["devices"] == ["GPU:0"]
    assert report["batches"] == [40.0, 40.0]
    assert report["iterations"] == 80
