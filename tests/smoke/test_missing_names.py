"""`fit` works without all private names that only other features need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import dataclasses
import warnings

import keras
import numpy as np

from kerasps import _compat, _private_names
from kerasps._private_names import FIT
from kerasps.hooks import table as hooks_table


def without(table):
    return [
        row if row.feature is FIT else dataclasses.replace(row, where="keras.src.moved:moved")
        for row in table
    ]


_compat.PRIVATE_NAMES = {row.name: row for row in without(_compat.PRIVATE_NAMES.values())}
_compat.PRIVATE_ATTRIBUTES = without(_compat.PRIVATE_ATTRIBUTES)
hooks_table.PATCHES = without(hooks_table.PATCHES)

import kerasps

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cluster = kerasps.LocalCluster(num_workers=1, num_ps=1)
    strategy = kerasps.ParameterServerStrategy(cluster)
[warning] = [str(w.message) for w in caught if "private names are missing" in str(w.message)]
lacking = {row.feature for row in _compat.PRIVATE_ATTRIBUTES if row.feature is not FIT}
assert all(feature.name in warning for feature in lacking), warning

x = np.arange(64, dtype="int32").reshape(32, 2) % 8
y = np.ones((32, 1), "float32")


def make():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), keras.layers.Embedding(8, 4), keras.layers.Flatten(),
         keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", metrics=["mae"])
    return model


with strategy.scope():
    model = make()
initial = model.get_weights()
before = model.evaluate(x, y, batch_size=8, verbose=0)[0]
model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False)
assert model.evaluate(x, y, batch_size=8, verbose=0)[0] < before
plain = make()
plain.set_weights(initial)
plain.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False)
for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)

for use in (
    lambda: model.save("model.keras"),
    lambda: model.save_weights("model.weights.h5"),
    lambda: model.fit(x, y, verbose=0, callbacks=[keras.callbacks.BackupAndRestore("backup")]),
    lambda: model.fit(x, y, verbose=0, validation_split=0.5),
    lambda: strategy.coordinator.schedule(print),
    lambda: model.export("exported", verbose=False),
):
    try:
        use()
    except kerasps.MissingNameError as error:
        assert "Install a supported pair of versions" in str(error)
        print("refused:", str(error).partition(" cannot work")[0])
plain.save("plain.keras")
cluster.close()
"""


def test_fit_needs_no_name_that_only_another_feature_needs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"{SCRIPT}")
    checkout = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([checkout, *sys.path])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("refused: ")] == [
        "refused: saving and loading models",
        "refused: saving and loading models",
        "refused: `BackupAndRestore`",
        "refused: `validation_split`",
        "refused: `ClusterCoordinator.schedule`",
        "refused: `Model.export` and `tf.saved_model.save`",
    ]
