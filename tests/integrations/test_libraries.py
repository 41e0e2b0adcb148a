"""Libraries that wrap Keras or log its trainings, and Keras 2 beside Keras 3, as they are released.

`tox -e integrations` installs them and runs this. The other tests show the same without them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.process_checks import run_and_report

FOLDER = Path(__file__).parent
LOSSES = ["loss", "val_loss"]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(
    ("library", "logged"),
    [
        (
            "mlflow_autolog",
            {"metrics": [*LOSSES, "validation_loss"], "epochs": "2", "same_weights": True},
        ),
        ("mlflow_callback", {"metrics": [*LOSSES, "validation_loss"]}),
        (
            "wandb",
            {
                "metrics": ["batch/loss", "epoch/loss", "epoch/val_loss"],
                "epochs": 1,
                "last_batch": 14,
                "files": ["model-1.keras", "model-2.keras"],
            },
        ),
    ],
)
def test_a_training_is_logged_and_does_its_steps(tmp_path, library, logged, moment):
    report = run_and_report(FOLDER / "logged_training.py", library, moment, tmp_path)
    assert report == {"steps": 16, "epochs_done": 2, "logged": logged}


@pytest.mark.parametrize("legacy", ["0", "1"])
def test_keras_2_is_refused_in_the_scope_and_works_outside_of_it(tmp_path, monkeypatch, legacy):
    monkeypatch.chdir(tmp_path)
    report = run_and_report(FOLDER / "keras_2_beside.py", legacy)
    errors = report["errors"]
    assert {name for name, error in errors.items() if error} == set(report["refused"])
    assert {errors[name] for name in report["refused"]} == {"UnsupportedError"}
