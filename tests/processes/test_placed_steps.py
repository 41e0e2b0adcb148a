"""The compute phase is on the device that is named for it, in every mode, and all else is on a CPU:
read from the graphs that TensorFlow has placed on real workers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.matrix import with_matrix
from support.placed import ACCELERATOR, CPU, OF_SCALARS, conversions_on_accelerator
from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("placed_steps.py")
# Of a step of `wide_model`: three arrays, four weights, the rows that were looked up, and two
# numbers for the dropout; five gradients.
VALUES_IN, GRADIENTS_OUT = 10, 5
# Of an execution: metric states, of which some begin as one tensor.
STATES = 2
STEPS = 4


def written(folder):
    """The environment in which TensorFlow writes its graphs there."""
    return {
        "TF_DUMP_GRAPH_PREFIX": str(folder),
        "TF_DUMP_GRAPH_NAME_FILTER": "*",
        "TF_DUMP_GRAPH_GROUPS": "main",
    }


def phases_of(report):
    """The graphs in which there is a compute phase, by the name of their function."""
    assert report["devices"] == [ACCELERATOR]
    return {
        name: [graph for graph in graphs if graph["compute"]]
        for name, graphs in report["graphs"].items()
    }


def assert_placed(phases, devices=(ACCELERATOR,)):
    for name, graphs in phases.items():
        for graph in graphs:
            assert graph["others"] == [], name
            assert set(graph["compute"]) - {CPU} == set(devices), name
            assert set(graph["compute"].get(CPU, ())) <= OF_SCALARS, name


def assert_crossings(training, *, overlaps=False):
    # Overlapping executions go out two at a time, and hand their counter on from step to step.
    num_steps, counters = (2 * STEPS, 1) if overlaps else (STEPS, 0)
    assert training["calls"] == num_steps
    assert training["there"] <= num_steps * (VALUES_IN + counters) + STATES
    assert training["back"] <= num_steps * (GRADIENTS_OUT + counters) + STATES


@pytest.mark.parametrize(
    "mode", with_matrix(["async", "sync", "overlap"], at_length=["sync", "overlap"])
)
def test_steps_of_a_coordinator(mode, tmp_path):
    phases = phases_of(run_and_report(SCRIPT, mode, tmp_path))
    assert_placed(phases)
    training = phases["steps"][0]  # `fit` comes first
    assert_crossings(training, overlaps=mode == "overlap")
    assert "TanhGrad" in training["compute"][ACCELERATOR]
    (predicting,) = phases["on_worker"]
    assert "_FusedMatMul" in predicting["compute"][ACCELERATOR]
    if mode == "async":
        assert "TanhGrad" in phases["scheduled_step"][0]["compute"][ACCELERATOR]
        # A layer with a loop is a function of its own; so is what XLA compiles, which is a call.
        assert all("SigmoidGrad" in graph["compute"][ACCELERATOR] for graph in phases["compute"])
        assert phases["steps"][-1]["compute"][ACCELERATOR] == ["PartitionedCall"]


def test_what_travels_in_16_bits_is_converted_on_the_device_that_computes(tmp_path):
    """So that half the bytes go to a GPU, and come from it."""
    phases = phases_of(run_and_report(SCRIPT, "wire", tmp_path))
    assert phases["steps"][0]["others"] == ["Cast"]
    # Of each step, the value and the gradient of the kernel that is not small.
    conversions = conversions_on_accelerator(tmp_path, "steps")
    assert conversions["bfloat16", "float"] == conversions["float", "bfloat16"] == STEPS


def test_steps_on_several_devices(tmp_path):
    report = run_and_report(SCRIPT, "several", tmp_path)
    devices = report.pop("devices")
    assert devices == ["CPU:1", "CPU:2"]
    phases = phases_of({"devices": [ACCELERATOR], **report})
    assert_placed(phases, devices)
    for device in devices:
        assert "TanhGrad" in phases["steps"][0]["compute"][device]


def test_steps_of_a_worker_that_drives_them(tmp_path):
    cluster = ["--mode", "worker", "--num-workers", "1", "--num-ps", "2"]
    command = ["-m", "kerasps", "launch", *cluster, SCRIPT, "driven", tmp_path]
    report = run_and_report(*command, forked=False, **written(tmp_path))
    phases = phases_of(report)
    assert_placed(phases)
    assert_crossings(phases["alone"][0])
    assert any(graph["calls"] == 1 for graph in phases["alone"]), "train_on_batch"


def test_steps_of_central_storage(tmp_path):
    report = run_and_report(SCRIPT, "central", tmp_path, forked=False, **written(tmp_path))
    assert report["kinds"] == {
        "MatMul": [ACCELERATOR],
        "_FusedMatMul": [ACCELERATOR],
        "TanhGrad": [ACCELERATOR],
        "AssignSubVariableOp": [CPU],
    }
