"""CentralStorageStrategy gives the weights and metrics of TensorFlow's MirroredStrategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

SCRIPT = Path(__file__).with_name("central_storage.py")

# What MirroredStrategy cannot do under Keras 3 either, with the beginning of both errors.
MEETS_IN_A_BRANCH = ("RuntimeError", "`merge_call` called while defining a new graph")
ADDS_UP_THE_PARTS = ("InvalidArgumentError", "Inputs to operation AddN")
FAILING = {
    "optimizer accumulated": (MEETS_IN_A_BRANCH, MEETS_IN_A_BRANCH),
    "optimizer averaged every third step": (MEETS_IN_A_BRANCH, MEETS_IN_A_BRANCH),
    "a_first_batch_that_devices_cannot_share": (ADDS_UP_THE_PARTS, ADDS_UP_THE_PARTS),
    "compiled_by_xla": (
        ("InvalidArgumentError", "Trying to access resource"),
        ("UnsupportedError", "XLA compiles a step for one device"),
    ),
    "a_function_compiled_by_xla": (
        ("ValueError", ""),
        ("UnsupportedError", "Received: jit_compile=True with CPU:0, CPU:1, CPU:2."),
    ),
}


@pytest.mark.parametrize(
    "group",
    [
        "models",
        pytest.param("ways", marks=pytest.mark.matrix),
        pytest.param("loops", marks=pytest.mark.matrix),
    ],
)
def test_training_equals_that_of_a_mirrored_strategy(group, tmp_path):
    report = run_and_report(SCRIPT, group, tmp_path)
    cases = report["cases"]
    refused = cases.pop("a_shared_variable_in_control_flow", None)
    failing = {name: cases.pop(name) for name in FAILING if name in cases}
    assert {name: case for name, case in cases.items() if "apart" not in case} == {}
    assert {name: case for name, case in cases.items() if case["apart"] > 1e-6} == {}
    assert all(case["finite"] and case["values"] for case in cases.values())
    for name, errors in failing.items():
        for strategy, (kind, text) in zip(("mirrored", "central"), FAILING[name], strict=True):
            assert failing[name][strategy].startswith(f"{kind}: "), (name, strategy)
            assert text in failing[name][strategy], (name, strategy)
        assert errors
    # No hook of kerasps was installed: this was Keras's own trainer.
    assert report["hooks"] == 0
    if group == "loops":
        assert refused["mirrored"] is None
        assert refused["central"].startswith("UnsupportedError: The variable 'Variable:0' is ")
        # Within `tf.device(strategy.parameter_device)` rows are looked up beside the table.
        assert report["lookup_devices"] == [["CPU:1", "CPU:2"], ["CPU:0"]]
    if group == "models":
        assert report["apart_from_one_process"] < 1e-6
        once, each = [["CPU:0"]], [["CPU:1", "CPU:2"]]
        assert report["devices"] == {
            "weights": once,
            "slots": once,
            "counters": once,
            "state": each,
            "metrics": each,
        }


@pytest.mark.matrix
def test_a_connected_cluster_changes_nothing(tmp_path):
    report = run_and_report(SCRIPT, "beside", tmp_path)
    assert report["hooks"] > 0
    assert {name for name, case in report["cases"].items() if not case["apart"] < 1e-6} == set()
