"""The pages on moving: both columns run, where what the left one needs is installed, and agree."""

from __future__ import annotations

import importlib.util
import json
import os
import re
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
SERVERS = TESTS / "processes" / "moving_before.py"

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


def ran(directory, name, code, *words, python=sys.executable):
    """Runs a script of this name, and returns what it reported."""
    script = directory / f"{name}.py"
    script.write_text(code)
    done = subprocess.run(
        [python, *words, str(script)],
        env=marked_environment(
            "moving",
            directory,
            KERAS_BACKEND="tensorflow",
            TF_CPP_MIN_LOG_LEVEL="3",
            PYTHONPATH=str(TESTS.parent) if python == sys.executable else "",
        ),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    return {kind: json.loads(rest) for kind, _, rest in lines if kind in ("REPORT", "ERRORS")}


# The Python that has TensorFlow 2.15, with estimators and TensorFlow Recommenders-Addons.
PYTHON_BEFORE = os.environ.get("KERASPS_PYTHON_BEFORE")
HAS_KERAS_2 = importlib.util.find_spec("tf_keras") is not None
needs_python_before = pytest.mark.skipif(
    not PYTHON_BEFORE, reason="KERASPS_PYTHON_BEFORE names no Python: see `tox -e moving`"
)
needs_keras_2 = pytest.mark.skipif(not HAS_KERAS_2, reason="tf_keras is not installed")


def assert_page_quotes(page, messages):
    """Each message that the page quotes is one that came, in the order of the page."""
    quoted = errors_of_page(page)
    assert quoted
    assert len(messages) == len(quoted)
    for quote, message in zip(quoted, messages, strict=True):
        assert quote in message


# From tf_keras

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


@pytest.fixture(scope="module")
def from_tf_keras(tmp_path_factory):
    """The directory of both scripts, and what they reported."""
    directory = tmp_path_factory.mktemp("tf_keras")
    (before,), (after, weights) = columns("moving_from_tf_keras").values()
    told = {}
    after += REPORT
    if HAS_KERAS_2:
        before += REPORT + "np.savez('before.npz', *model.get_weights())\n"
        told["before"] = ran(directory, "before", before, str(SERVERS))
        after += weights + "np.savez('after.npz', *model.get_weights())\n"
        after += REFUSED_TO_KERAS_2 + ERRORS
    told["after"] = ran(directory, "after", after, *LAUNCH, "--num-workers=2", "--num-ps=2")
    return directory, told


def assert_learned(told):
    """Three epochs of 20 steps, which all workers together have done."""
    report = told["REPORT"]
    assert report["iterations"] == 60
    assert len(report["loss"]) == 3
    assert report["loss"][-1] < report["loss"][0]


def test_after_tf_keras(from_tf_keras):
    assert_learned(from_tf_keras[1]["after"])


@needs_keras_2
def test_before_and_after_tf_keras(from_tf_keras):
    directory, told = from_tf_keras
    assert_learned(told["before"])
    assert told["before"]["REPORT"].keys() == told["after"]["REPORT"].keys()
    first, second, *others = np.load(directory / "before.npz").values()
    moved = np.load(directory / "after.npz").values()
    for expected, weight in zip([np.concatenate([first, second]), *others], moved, strict=True):
        np.testing.assert_array_equal(weight, expected)
    assert_page_quotes("moving_from_tf_keras", told["after"]["ERRORS"])


# From Estimator

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
evaluated = {name: float(results[0][name]) for name in ("accuracy", "global_step")}
print("REPORT " + json.dumps(evaluated))
"""


# `tox -e moving` runs it too.
@pytest.mark.matrix
def test_after_estimator(tmp_path):
    _, (after,) = columns("moving_from_estimator").values()
    evaluator = f"--evaluator={tmp_path / 'after.py'}"
    options = ("--mode=worker", "--num-workers=2", "--num-ps=1", evaluator)
    ran(tmp_path, "after", after + OF_ESTIMATOR, *LAUNCH, *options)
    saved = {re.search(r"model-(\d+)", path.name)[1] for path in tmp_path.glob("run/*.weights.h5")}
    assert json.loads((tmp_path / "iterations.json").read_text()) == max(map(int, saved)) == 400
    assert json.loads((tmp_path / "evaluated.json").read_text())[-1] == 400
    assert len(saved) <= 3
    model = keras.models.load_model(tmp_path / "run" / "best" / "model.keras")
    people = {"age": [[70.0], [5.0]], "color": [["red"]] * 2, "city": [["Rome"]] * 2}
    old, young = model({name: tf.constant(values) for name, values in people.items()})
    assert float(old[0]) > 0.5 > float(young[0])


@needs_python_before
def test_before_estimator_steps_checkpoints_and_exports_are_as_many(tmp_path):
    (before,), _ = columns("moving_from_estimator").values()
    told = ran(tmp_path, "before", before + OF_ESTIMATOR_BEFORE, python=PYTHON_BEFORE)["REPORT"]
    assert told["global_step"] == 400
    assert told["accuracy"] > 0.8
    saved = {path.suffixes[0] for path in tmp_path.glob("run/model.ckpt-*.index")}
    assert max(saved) == ".ckpt-400"
    assert len(saved) <= 3
    assert [*tmp_path.glob("run/export/best_exporter/*/saved_model.pb")]


# From TensorFlow Recommenders-Addons

REPORT_ROWS = """
import json
ids = np.concatenate([ids for ids, _ in model.get_layer("items").items()])
report = {
    "iterations": int(model.optimizer.iterations.numpy()),
    "loss": history.history["loss"],
    "rows": model.get_layer("items").num_rows,
    "rows_are_those_of_ids": np.array_equal(np.sort(ids), np.unique(x)),
}
print("REPORT " + json.dumps(report), flush=True)
"""
SAME_ROWS = """
np.testing.assert_array_equal(from_files.rows(exported["ids"]), exported["rows"])
assert from_files.num_rows == len(exported["ids"])
"""
REFUSED_IDS = """
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
    return [
        lambda: raw.fit(x, y, batch_size=50, verbose=0),
        lambda: kerasps.layers.DynamicEmbedding(16)(np.ones(3)),
    ]
"""


@pytest.fixture(scope="module")
def from_addons(tmp_path_factory):
    """What both scripts reported, and the number of ids that the table had before."""
    directory = tmp_path_factory.mktemp("addons")
    (before,), (after, rows, files) = columns("moving_from_recommenders_addons").values()
    told, exported, saved = {}, directory / "items.npz", directory / "saved"
    if PYTHON_BEFORE:
        before += 'model.layers[0].params.save_to_file_system("saved")\n'
        told["before"] = ran(directory, "before", before + REPORT, python=PYTHON_BEFORE)
    else:
        random = np.random.default_rng(2)
        ids = random.choice(2**40, 500, replace=False)
        table = {"ids": ids, "rows": random.normal(size=(500, 16)).astype("float32")}
        np.savez(exported, **table)
        saved.mkdir()
        for end, values in zip(("keys", "values"), table.values(), strict=True):
            values.tofile(saved / f"items-parameter_mht_1of1_rank0_size1-{end}")
    after += REPORT_ROWS + rows + files + SAME_ROWS + REFUSED_IDS + ERRORS
    told["after"] = ran(directory, "after", after, *LAUNCH, "--num-workers=2", "--num-ps=2")
    return told, len(np.load(exported)["ids"])


# `tox -e moving` runs it too.
@pytest.mark.matrix
def test_after_recommenders_addons(from_addons):
    told, _ = from_addons
    report = told["after"]["REPORT"]
    assert report["iterations"] == 300
    assert report["loss"][-1] < report["loss"][0] / 2
    assert report["rows_are_those_of_ids"]
    assert_page_quotes("moving_from_recommenders_addons", told["after"]["ERRORS"])


@needs_python_before
def test_before_recommenders_addons_as_many_steps_and_rows(from_addons):
    told, num_ids = from_addons
    before, after = told["before"]["REPORT"], told["after"]["REPORT"]
    assert before["iterations"] == after["iterations"]
    assert before["loss"][-1] < before["loss"][0] / 2
    assert after["rows"] == num_ids
