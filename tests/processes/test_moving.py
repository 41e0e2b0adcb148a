"""The pages on moving: both columns run, where what the left one needs is installed, and agree."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from support.documentation import columns, errors_of_page
from support.process_checks import marked_environment

TESTS = Path(__file__).parents[1]
LAUNCH = ("-m", "kerasps", "launch")

# What a script says at its end, of whichever Keras its model is.
REPORT = """
import json
report = {"iterations": int(model.optimizer.iterations.numpy()), **history.history}
print("REPORT " + json.dumps(report), flush=True)
"""
# `errors` calls what the page says is refused.
ERRORS = """
messages = []
for call in errors():
    try:
        call()
    except Exception as exc:
        messages.append(str(exc))
print("ERRORS " + json.dumps(messages), flush=True)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script in a Python, and returns what it reported."""

    def run(name, code, *words, python=sys.executable):
        script = tmp_path / f"{name}.py"
        script.write_text(code)
        done = subprocess.run(
            [python, *words, str(script)],
            env=marked_environment(
                "moving",
                tmp_path,
                KERAS_BACKEND="tensorflow",
                TF_CPP_MIN_LOG_LEVEL="3",
                PYTHONPATH=str(TESTS.parent) if python == sys.executable else "",
            ),
            cwd=script.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        lines = [line.partition(" ") for line in done.stdout.splitlines()]
        return {kind: json.loads(rest) for kind, _, rest in lines if kind in ("REPORT", "ERRORS")}

    return run


def assert_page_quotes(page, messages):
    """Each message that the page quotes is one that came, in the order of the page."""
    quoted = errors_of_page(page)
    assert quoted
    assert len(messages) == len(quoted)
    for quote, message in zip(quoted, messages, strict=True):
        assert quote in message


REFUSED_TO_KERAS_2 = """
def errors():
    def dense_of_keras_2():
        import tf_keras

        with strategy.scope():
            tf_keras.layers.Dense(1).build((None, 3))

    return [
        dense_of_keras_2,
        lambda: model.fit(dataset_fn, steps_per_epoch=1),
        lambda: model.fit(kerasps.DatasetCreator(dataset_fn)),
    ]
"""


@pytest.mark.timeout(320)
def test_both_columns_for_tf_keras(run, tmp_path):
    page = "moving_from_tf_keras"
    (before,), (after, weights) = columns(page).values()
    launch = (*LAUNCH, "--num-workers=2", "--num-ps=2")
    if importlib.util.find_spec("tf_keras") is None:
        assert_learned(run("after", after + REPORT, *launch))
        pytest.skip("tf_keras is not installed: the right column ran without the left one.")
    before += REPORT + "np.savez('before.npz', *model.get_weights())\n"
    theirs = run("before", before, str(TESTS / "processes" / "moving_before.py"))
    after += REPORT + weights + "np.savez('after.npz', *model.get_weights())\n"
    ours = run("after", after + REFUSED_TO_KERAS_2 + ERRORS, *launch)
    for told in (theirs, ours):
        assert_learned(told)
    assert ours["REPORT"].keys() == theirs["REPORT"].keys()
    first, second, *others = np.load(tmp_path / "before.npz").values()
    moved = np.load(tmp_path / "after.npz").values()
    for expected, weight in zip([np.concatenate([first, second]), *others], moved, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert_page_quotes(page, ours["ERRORS"])


OF_ESTIMATOR = """
import json
if isinstance(results, list):
    report = {"evaluated": [evaluation.iterations for evaluation in results]}
else:
    report = {"iterations": int(results.model.optimizer.iterations.numpy())}
[kind] = report
with open(f"{kind}.json", "w") as file:
    json.dump(report[kind], file)
"""
OF_ESTIMATOR_BEFORE = """
import json
print("REPORT " + json.dumps(float(results[0]["accuracy"])))
"""


@pytest.mark.timeout(320)
def test_both_columns_for_estimator(run, tmp_path):
    (before,), (after,) = columns("moving_from_estimator").values()
    script = tmp_path / "after.py"
    options = ("--mode=worker", "--num-workers=2", "--num-ps=1", f"--evaluator={script}")
    run("after", after + OF_ESTIMATOR, *LAUNCH, *options)
    saved = {
        int(path.name.split("-")[1].split(".")[0]) for path in tmp_path.glob("run/*.weights.h5")
    }
    assert json.loads((tmp_path / "iterations.json").read_text()) == max(saved) == 400
    assert json.loads((tmp_path / "evaluated.json").read_text())[-1] == 400
    assert len(saved) <= 3
    model = keras.models.load_model(tmp_path / "run" / "best" / "model.keras")
    person = {"age": [[70.0]], "color": [["red"]], "city": [["Rome"]]}
    old = model({name: tf.constant(value) for name, value in person.items()})
    young = model({name: tf.constant(value) for name, value in (person | {"age": [[5.0]]}).items()})
    assert float(old[0, 0]) > 0.5 > float(young[0, 0])
    (tmp_path / "before").mkdir()
    accuracy = run("before/before", before + OF_ESTIMATOR_BEFORE, python=python_before())["REPORT"]
    assert accuracy > 0.8
    numbers = {
        path.suffixes[0] for path in (tmp_path / "before" / "run").glob("model.ckpt-*.index")
    }
    assert max(numbers) == ".ckpt-400"
    assert len(numbers) <= 3


REPORT_ROWS = """
import json
hashed = np.unique(keras.ops.convert_to_numpy(model.layers[0](x)))
report = {
    "iterations": int(model.optimizer.iterations.numpy()),
    "loss": history.history["loss"],
    "looked_up": str(strategy.placement().looked_up),
    "used": len(hashed),
}
(table,), (slot,) = model.get_layer("items").get_weights(), [
    variable for variable in model.optimizer.variables if tuple(variable.shape) == (20_000, 16)
]
touched = np.flatnonzero((keras.ops.convert_to_numpy(slot) != 0.1).any(1))
report["touched_are_used"] = touched.tolist() == hashed.tolist()
print("REPORT " + json.dumps(report), flush=True)
"""
REFUSED_AN_ID = """
predicted = model.predict(exported["ids"], verbose=0)
kernel, bias = model.layers[-1].get_weights()
np.testing.assert_allclose(predicted, exported["rows"] @ kernel + bias, rtol=1e-4, atol=1e-6)
model.fit(x, y, batch_size=50, verbose=0)


def errors():
    with strategy.scope():
        raw = keras.Sequential(
            [keras.Input((), dtype="int64"), keras.layers.Embedding(20_000, 16)]
        )
        raw.compile("sgd", "mse")
    return [lambda: raw.fit(x, y, batch_size=50, verbose=0)]
"""


@pytest.mark.timeout(320)
def test_both_columns_for_recommenders_addons(run, tmp_path):
    page = "moving_from_recommenders_addons"
    (before,), (after, rows) = columns(page).values()
    python = os.environ.get("KERASPS_PYTHON_BEFORE")
    if python:
        theirs = run("before", before + REPORT, python=python)["REPORT"]
        assert theirs["iterations"] == 300
        num_ids = len(np.load(tmp_path / "items.npz")["ids"])
    else:
        random = np.random.default_rng(2)
        ids = random.choice(2**40, num_ids := 500, replace=False)
        np.savez(tmp_path / "items.npz", ids=ids, rows=random.normal(size=(500, 16)).astype("f4"))
    after += REPORT_ROWS + rows + REFUSED_AN_ID + ERRORS
    told = run("after", after, *LAUNCH, "--num-workers=2", "--num-ps=2")
    ours = told["REPORT"]
    assert ours["iterations"] == 300
    assert ours["loss"][-1] < ours["loss"][0] / 2
    assert ours["looked_up"] == "by rows: 1 variable, 1,280,000 bytes"
    assert ours["touched_are_used"]
    assert num_ids - 25 <= ours["used"] <= num_ids
    assert_page_quotes(page, told["ERRORS"])
    if python:
        assert theirs["loss"][-1] < theirs["loss"][0] / 2
    else:
        python_before()


def python_before():
    """The Python that has TensorFlow 2.15 and its estimators, or a skip."""
    if "KERASPS_PYTHON_BEFORE" not in os.environ:
        pytest.skip("KERASPS_PYTHON_BEFORE names no Python: the right column ran without the left.")
    return os.environ["KERASPS_PYTHON_BEFORE"]


def assert_learned(told):
    """Three epochs of 20 steps, which all workers together have done."""
    report = told["REPORT"]
    assert report["iterations"] == 60
    assert len(report["loss"]) == 3
    assert report["loss"][-1] < report["loss"][0]
