"""Which models are exported, under which names.

What an evaluator makes of it is in test_evaluator.py.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest

import kerasps


def model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def test_an_export_can_be_named_after_iterations_and_metrics(tmp_path):
    export = kerasps.SidecarEvaluatorModelExport(
        tmp_path / "{checkpoint}-{iterations}-{loss:.2f}.keras"
    )
    export.set_model(model())
    assert export.export("a", 7, {"loss": 0.5}) == tmp_path / "a-7-0.50.keras"
    assert export.export("b", 8, {"loss": 0.6}) is None


def test_nan_is_never_the_best(tmp_path):
    export = kerasps.SidecarEvaluatorModelExport(tmp_path / "model.keras")
    export.set_model(model())
    assert export.best is None
    assert export.export("a", 1, {"loss": float("nan")}) is None
    assert export.export("b", 2, {"loss": 9.0}) == tmp_path / "model.keras"
    assert export.best == 9.0


def test_a_metric_that_is_not_there_cannot_be_monitored(tmp_path):
    export = kerasps.SidecarEvaluatorModelExport(tmp_path / "model.keras", monitor="val_loss")
    with pytest.raises(
        ValueError,
        match=r"Expected: one of 'loss', 'mae'\. Received: monitor='val_loss'",
    ):
        export.export("a", 1, {"loss": 1.0, "mae": 1.0})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{checkpoint}/model.keras", "Only the file name of an export can contain fields."),
        ("best/model-{epoch:03d}.keras", "does not know the epoch or the batch"),
        ("best/model.h6", "ends in `.keras`"),
    ],
)
def test_an_export_that_cannot_be_named_is_refused(path, message):
    with pytest.raises(ValueError, match=message):
        kerasps.SidecarEvaluatorModelExport(path)


def test_an_export_is_no_callback_of_fit(tmp_path):
    with pytest.raises(kerasps.UnsupportedError, match="saves after evaluations"):
        model().fit(
            np.ones((4, 4)),
            np.ones((4, 1)),
            verbose=0,
            callbacks=[kerasps.SidecarEvaluatorModelExport(tmp_path / "model.keras")],
        )
