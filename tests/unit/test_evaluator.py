"""The side-car evaluator in a process without a cluster: what it evaluates, what it exports, and
when it ends.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.evaluator import sidecar as evaluator
from kerasps.evaluator import training_end
from support.matrix import with_matrix

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
EVALUATION_DATA = (X[:32], Y[:32])


def compiled(optimizer="adam", units=3):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(units), keras.layers.BatchNormalization()]
    )
    model.add(keras.layers.Dense(1))
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def adam(is_scaled):
    return (
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
        if is_scaled
        else keras.optimizers.Adam()
    )


class Training:
    """A training in this process, one epoch at a time, and what its model gives on the data of the
    evaluation.
    """

    def __init__(self, is_scaled):
        self.model = compiled(adam(is_scaled))
        self.managers = {}

    @property
    def iterations(self):
        return int(self.model.optimizer.iterations.numpy())

    def epoch(self):
        self.model.fit(X, Y, batch_size=32, verbose=0)
        return self

    def save(self, path):
        if path.suffix == ".keras":
            self.model.save(path)
        elif path.suffix == ".h5":
            self.model.save_weights(path)
        else:
            self.manager(path).save()
        return path

    def manager(self, path):
        if path not in self.managers:
            checkpoint = (
                tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer)
                if path.name == "both"
                else tf.train.Checkpoint(self.model)
            )
            self.managers[path] = tf.train.CheckpointManager(
                checkpoint, str(path.parent), 2, checkpoint_name=path.name
            )
        return self.managers[path]

    def metrics(self):
        return self.model.evaluate(*EVALUATION_DATA, verbose=0, return_dict=True)


class AfterEvaluation(keras.callbacks.Callback):
    """Does the next of some things after each evaluation."""

    def __init__(self, *actions):
        super().__init__()
        self.actions = list(actions)

    def on_test_end(self, logs=None):
        if self.actions:
            self.actions.pop(0)()


# Tracing takes most of the time, so the tests share models: no test cares what was trained or
# evaluated before it.
shared_training = functools.cache(lambda is_scaled=False: Training(is_scaled).epoch())


@functools.cache
def shared_model(is_scaled=False, has_slots=False):
    model = compiled(adam(is_scaled))
    if has_slots:
        model.optimizer.build(model.trainable_variables)
    return model


@pytest.fixture
def training():
    return shared_training()


@pytest.fixture
def waiting(monkeypatch):
    """What is in this list happens, one thing each time, while an evaluator waits; at the end of
    the list the test fails.
    """
    actions = []

    def sleep(seconds):
        assert actions, "the evaluator waits for something that does not come"
        actions.pop(0)()

    monkeypatch.setattr(evaluator, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    return actions


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "checkpoints"
    path.mkdir()
    return path


def end_training(directory):
    kerasps.TrainingEndMarker(directory).on_train_end()


def sidecar(directory, *, model=None, data=EVALUATION_DATA, **options):
    return kerasps.SidecarEvaluator(model or shared_model(), data, directory, **options)


def names(evaluations):
    return [os.path.basename(evaluation.checkpoint) for evaluation in evaluations]


def approximately(metrics):
    return pytest.approx(metrics, rel=1e-5)


KINDS = ["model.weights.h5", "model.keras", "both", "root"]


@pytest.mark.parametrize(
    ("kind", "is_scaled", "has_slots"),
    with_matrix(
        [(kind, *of) for kind in KINDS for of in ((False, False), (False, True), (True, False))],
        # Of each kind, the others are with and without slots, and scaled, in turn.
        at_length=[
            *(("model.weights.h5", False, False), ("model.keras", False, False)),
            *(("both", False, True), ("both", True, False)),
            *(("root", False, True), ("root", False, False)),
        ],
    ),
)
def test_every_kind_of_checkpoint_is_evaluated_whenever_it_is_written(
    directory, waiting, kind, is_scaled, has_slots
):
    training = shared_training(is_scaled)
    training.save(directory / kind)
    expected = [training.metrics()]
    iterations = training.iterations

    def go_on():
        training.epoch().save(directory / kind)
        expected.append(training.metrics())
        waiting.append(lambda: end_training(directory))

    model = shared_model(is_scaled, has_slots)
    evaluations = sidecar(directory, model=model, callbacks=[AfterEvaluation(go_on)]).start()
    assert [evaluation.metrics for evaluation in evaluations] == [
        approximately(metrics) for metrics in expected
    ]
    assert [evaluation.iterations for evaluation in evaluations] == [iterations, iterations + 2]
    assert int(model.optimizer.iterations.numpy()) == iterations + 2
    assert expected[0]["loss"] != approximately(expected[1]["loss"])


def test_only_the_newest_is_evaluated_and_nothing_twice(training, directory, waiting):
    for epoch in (9, 10, 11):
        training.epoch().save(directory / f"epoch-{epoch}.weights.h5")
    for epoch in (9, 10, 11):
        os.utime(directory / f"epoch-{epoch}.weights.h5", (1e9, 1e9))

    def remove_newest():
        (directory / "epoch-11.weights.h5").unlink()

    def save_two():
        training.save(directory / "epoch-12.keras")
        training.save(directory / "epoch-13.weights.h5")
        os.utime(directory / "epoch-13.weights.h5", (2e9, 2e9))

    waiting += [remove_newest, save_two, lambda: end_training(directory)]
    assert names(sidecar(directory).start()) == ["epoch-11.weights.h5", "epoch-13.weights.h5"]


def test_other_files_are_left_alone(training, directory, waiting):
    training.save(directory / "model.keras")
    shutil.copy(directory / "model.keras", directory / ".hidden.keras")
    shutil.copy(directory / "model.keras", directory / "model.keras.tmp")
    (directory / "training_metadata.json").write_text("{}")
    waiting.append(lambda: end_training(directory))
    assert names(sidecar(directory).start()) == ["model.keras"]


@pytest.mark.parametrize(
    ("kind", "say_after"),
    [("model.weights.h5", -1.0), ("model.weights.h5", 60.0), ("model.keras", -1.0), ("both", -1.0)],
)
def test_a_half_written_checkpoint_is_read_when_it_is_complete(
    training, directory, waiting, capsys, monkeypatch, kind, say_after
):
    monkeypatch.setattr(evaluator, "SAY_UNREADABLE_AFTER_S", say_after)
    training.save(directory / kind)
    broken = max(directory.iterdir(), key=lambda path: path.stat().st_size)
    content = broken.read_bytes()
    broken.write_bytes(content[: len(content) // 2])
    waiting += [
        lambda: broken.write_bytes(content[:-1]),
        lambda: broken.write_bytes(content),
        lambda: end_training(directory),
    ]
    (evaluation,) = sidecar(directory).start()
    assert evaluation.metrics == approximately(training.metrics())
    assert capsys.readouterr().out.count("cannot be read yet, trying again: ") == (say_after < 0)


def test_a_checkpoint_that_is_written_again_while_it_is_read_is_read_again(
    training, directory, waiting, monkeypatch
):
    path = training.save(directory / "model.weights.h5")
    iterations = training.iterations
    copy = shutil.copyfile

    def copy_and_overwrite(source, target):
        copy(source, target)
        monkeypatch.setattr(shutil, "copyfile", copy)
        training.epoch().save(path)
        os.utime(path, (2e9, 2e9))

    monkeypatch.setattr(shutil, "copyfile", copy_and_overwrite)
    waiting += [lambda: None, lambda: end_training(directory)]
    assert [evaluation.iterations for evaluation in sidecar(directory).start()] == [iterations + 2]


def test_reading_takes_no_lock_that_would_end_a_training(training, directory, waiting):
    path = training.save(directory / "model.weights.h5")
    waiting.append(lambda: end_training(directory))
    with path.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert len(sidecar(directory).start()) == 1


@pytest.mark.parametrize("kind", ["model.weights.h5", "both", "root"])
def test_a_checkpoint_of_another_model_is_an_error_in_the_end(
    training, directory, waiting, monkeypatch, kind
):
    training.save(directory / kind)
    monkeypatch.setattr(evaluator, "READ_LIMIT_S", -1.0)
    with pytest.raises(
        kerasps.CheckpointError,
        match="newest checkpoint cannot be read, and has not changed for -1 s",
    ) as caught:
        sidecar(directory, model=compiled(units=7)).start()
    assert "Expected: a complete checkpoint of the evaluator's model. Received: " in str(
        caught.value
    )
    assert "Make the model the same as in the training" in str(caught.value)


def test_a_tensorflow_checkpoint_without_the_optimizer_is_refused(directory, waiting, monkeypatch):
    model = compiled()
    tf.train.Checkpoint(layers=model.layers).save(str(directory / "ckpt"))
    monkeypatch.setattr(evaluator, "READ_LIMIT_S", -1.0)
    with pytest.raises(
        kerasps.CheckpointError, match="does not hold every variable of the model and its optimizer"
    ):
        sidecar(directory).start()


def test_a_checkpoint_without_iterations_is_evaluated(training, directory, waiting, tmp_path):
    keras.Sequential([keras.Input((4,)), *training.model.layers]).save_weights(
        directory / "a.weights.h5"
    )
    waiting.append(lambda: end_training(directory))
    best = kerasps.SidecarEvaluatorModelExport(tmp_path / "best" / "{checkpoint}.keras")
    (evaluation,) = sidecar(directory, log_dir=tmp_path / "logs", callbacks=[best]).start()
    assert evaluation.iterations is None
    assert {step for _, step, _ in summaries(tmp_path / "logs" / "validation")} == {1}


def test_data_can_be_a_dataset_and_steps_limit_it(training, directory, waiting):
    training.save(directory / "a.keras")
    waiting.append(lambda: end_training(directory))
    batches = []
    count = keras.callbacks.LambdaCallback()
    count.on_test_batch_end = lambda batch, logs=None: batches.append(batch)
    data = tf.data.Dataset.from_tensor_slices(EVALUATION_DATA).batch(8).repeat()
    assert len(sidecar(directory, data=data, steps=3, callbacks=[count]).start()) == 1
    assert batches == [0, 1, 2]


def summaries(directory):
    """What TensorBoard shows of a directory, as (tag, step, value)."""
    (file,) = directory.iterdir()
    events = tf.compat.v1.train.summary_iterator(str(file))
    found = [(value, event.step) for event in events for value in event.summary.value]
    assert {value.metadata.plugin_data.plugin_name for value, _ in found} == {"scalars"}
    return [(value.tag, step, float(tf.make_ndarray(value.tensor))) for value, step in found]


def test_summaries_have_the_iterations_as_their_steps(
    training, directory, waiting, tmp_path, capsys
):
    training.save(directory / "a.keras")
    first = training.iterations

    def go_on():
        training.epoch().save(directory / "b.keras")
        waiting.append(lambda: end_training(directory))

    evaluations = sidecar(
        directory, log_dir=tmp_path / "logs", callbacks=[AfterEvaluation(go_on)]
    ).start()
    expected = [
        (f"evaluation_{name}_vs_iterations", step, pytest.approx(value))
        for evaluation, step in zip(evaluations, (first, first + 2), strict=True)
        for name, value in evaluation.metrics.items()
    ]
    assert len(expected) == 4
    assert summaries(tmp_path / "logs" / "validation") == expected
    (loss, mae), later = evaluations[0].metrics.values(), evaluations[1].metrics
    assert capsys.readouterr().out.splitlines() == [
        f"SidecarEvaluator: a.keras at iteration {first}: loss {loss:.5g}, mae {mae:.5g}",
        f"SidecarEvaluator: b.keras at iteration {first + 2}: loss {later['loss']:.5g}, mae "
        f"{later['mae']:.5g}",
        "SidecarEvaluator: the training is over",
    ]


def test_it_ends_after_max_evaluations(training, directory, waiting, capsys):
    path = training.save(directory / "model.keras")

    def again():
        os.utime(path, (2e9, 2e9))

    assert (
        len(sidecar(directory, max_evaluations=2, callbacks=[AfterEvaluation(again)]).start()) == 2
    )
    assert capsys.readouterr().out.endswith("SidecarEvaluator: max_evaluations=2 is reached\n")


def test_the_number_that_tensorflow_gave_a_checkpoint_counts_for_max_evaluations(
    training, directory, waiting
):
    for _ in range(3):
        training.save(directory / "both")
    assert names(sidecar(directory, max_evaluations=3).start()) == ["both-3"]


def test_it_ends_when_nothing_comes_in_time(training, directory, waiting, monkeypatch, capsys):
    training.save(directory / "model.keras")
    assert len(sidecar(directory).start(timeout=0.0)) == 1
    assert f"no new checkpoint in {directory} for 0 s" in capsys.readouterr().out


def test_a_directory_without_checkpoints_is_pointed_out_once(
    tmp_path, waiting, monkeypatch, capsys
):
    monkeypatch.setattr(evaluator, "NOTICE_AFTER_S", -1.0)
    directory = tmp_path / "later"
    waiting += [lambda: None, lambda: end_training(directory)]
    assert sidecar(directory).start() == []
    kinds = "*.weights.h5, *.keras or what a tf.train.CheckpointManager writes"
    assert capsys.readouterr().out.splitlines() == [
        f"SidecarEvaluator: still waiting for {kinds}, in {directory}",
        f"SidecarEvaluator: the training is over, without a checkpoint in {directory}",
    ]


def test_the_marker_is_there_after_a_fit_and_not_during_it(training, tmp_path, waiting):
    directory = tmp_path / "made" / "by the callback"
    marker = directory / "training_ended"
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(marker.exists())
    )
    for _ in range(2):
        training.model.fit(X, Y, verbose=0, callbacks=[kerasps.TrainingEndMarker(directory), watch])
        seen.append(marker.exists())
    assert seen == [False, True, False, True]

    def fail(epoch, logs):
        raise RuntimeError("the training died")

    with pytest.raises(RuntimeError, match="the training died"):
        training.model.fit(
            X,
            Y,
            verbose=0,
            callbacks=[
                kerasps.TrainingEndMarker(directory),
                keras.callbacks.LambdaCallback(on_epoch_end=fail),
            ],
        )
    assert not marker.exists()


def test_the_marker_of_an_earlier_training_is_believed_after_a_while(
    training, directory, waiting, monkeypatch
):
    training.save(directory / "model.keras")
    end_training(directory)
    waiting += [lambda: None, lambda: monkeypatch.setattr(training_end, "OLD_MARKER_GRACE_S", -1.0)]
    assert len(sidecar(directory).start()) == 1
    assert waiting == []


def test_the_marker_of_an_earlier_training_is_forgotten_when_a_new_one_begins(
    training, directory, waiting
):
    end_training(directory)

    def train():
        training.model.fit(X, Y, verbose=0, callbacks=[kerasps.TrainingEndMarker(directory)])
        training.save(directory / "model.keras")
        os.utime(directory / "training_ended", (2e9, 2e9))

    waiting.append(train)
    assert names(sidecar(directory).start()) == ["model.keras"]


def test_a_launched_evaluator_ends_with_its_stdin_and_ignores_markers(
    training, directory, waiting, monkeypatch
):
    training.save(directory / "model.keras")
    monkeypatch.setenv("KERASPS_END_OF_TRAINING_ON_STDIN", "1")
    read_end, write_end = os.pipe()
    before = os.dup(0)
    os.dup2(read_end, 0)
    try:
        waiting += [lambda: end_training(directory), lambda: os.close(write_end)]
        assert len(sidecar(directory).start()) == 1
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(read_end)
    assert waiting == []


def evaluate_three(directory, waiting, export, model=None):
    """Exports while three checkpoints are evaluated, with a loss that falls and then rises; returns
    the losses.
    """
    training = shared_training()
    weights = [
        [value * 0 + bias for value in training.model.get_weights()] for bias in (0.1, 0.5, 0.9)
    ]

    def save(index):
        training.model.set_weights(weights[index])
        path = training.save(directory / f"epoch-{index + 1}.keras")
        os.utime(path, (1e9 + index, 1e9 + index))

    save(0)
    later = AfterEvaluation(lambda: save(1), lambda: save(2), lambda: end_training(directory))
    model = model or shared_model(has_slots=True)
    evaluations = sidecar(directory, model=model, callbacks=[export, later]).start()
    return [evaluation.metrics for evaluation in evaluations], weights


@pytest.mark.parametrize(
    ("options", "exported", "best"),
    [
        ({}, ["epoch-1.keras", "epoch-2.keras"], 1),
        ({"monitor": "mae", "mode": "max"}, ["epoch-1.keras", "epoch-3.keras"], 2),
        ({"initial_value_threshold": 1e-9}, [], None),
        ({"initial_value_threshold": 1e9, "monitor": "mae"}, ["epoch-1.keras", "epoch-2.keras"], 1),
        ({"save_weights_only": True}, ["epoch-1.weights.h5", "epoch-2.weights.h5"], 1),
    ],
)
def test_the_best_model_is_exported(directory, waiting, tmp_path, options, exported, best):
    ending = ".weights.h5" if options.get("save_weights_only") else ".keras"
    export = kerasps.SidecarEvaluatorModelExport(
        tmp_path / "best" / f"{{checkpoint}}{ending}", **options
    )
    metrics, weights = evaluate_three(directory, waiting, export)
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == exported
    if best is None:
        assert export.best == 1e-9
        return
    assert export.best == metrics[best][options.get("monitor", "loss")]
    restored = shared_model(has_slots=True)
    restored.load_weights(tmp_path / "best" / exported[-1])
    for value, expected in zip(restored.get_weights(), weights[best], strict=True):
        np.testing.assert_array_equal(value, expected)


def test_a_better_model_replaces_the_last(directory, waiting, tmp_path, capsys):
    export = kerasps.SidecarEvaluatorModelExport(tmp_path / "best" / "model.keras")
    metrics, _ = evaluate_three(directory, waiting, export, compiled())
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["model.keras"]
    # With slots, or Keras would warn that it cannot load them.
    loaded = keras.models.load_model(tmp_path / "best" / "model.keras")
    assert loaded.evaluate(*EVALUATION_DATA, verbose=0) == [
        pytest.approx(value, rel=1e-5) for value in metrics[1].values()
    ]
    line = f"SidecarEvaluator: the best so far, exported to {tmp_path / 'best' / 'model.keras'}"
    assert capsys.readouterr().out.splitlines().count(line) == 2


def test_an_export_among_the_checkpoints_is_refused(directory):
    export = kerasps.SidecarEvaluatorModelExport(directory / "best.keras")
    with pytest.raises(ValueError, match="exported among the checkpoints, and then be evaluated"):
        sidecar(directory, callbacks=[export])


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ("model", TypeError, "Argument `model` is not a model"),
        (
            keras.Sequential([keras.layers.Dense(1)]),
            ValueError,
            r"The model is not built\. .*Call `model.build",
        ),
        (
            keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]),
            ValueError,
            r"not compiled\. .*Call `model.compile",
        ),
    ],
)
def test_a_model_that_cannot_be_evaluated_is_refused(directory, model, error, message):
    with pytest.raises(error, match=message):
        sidecar(directory, model=model)


@pytest.mark.parametrize("argument", ["steps", "max_evaluations"])
@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (1.5, TypeError)]
)
def test_counts_are_checked(directory, argument, value, error):
    with pytest.raises(
        error,
        match=f"Argument `{argument}` is not a count. Expected: .* Received: {argument}={value!r}",
    ):
        sidecar(directory, **{argument: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"callbacks": 3}, "`callbacks` is not a list of `keras.callbacks.Callback`.*Put it into"),
        ({"callbacks": ["x"]}, "`callbacks` is not a list.*Remove 'x' from it"),
        ({"callbacks": [keras.callbacks.CSVLogger]}, ".*Make an object of it: `CSVLogger"),
        ({"log_dir": 3}, "`log_dir` names no path.*Received: log_dir=3"),
        ({"checkpoint_dir": None}, "`checkpoint_dir` names no path"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(directory, changes, message):
    with pytest.raises(TypeError, match=f"Argument {message}"):
        sidecar(changes.pop("checkpoint_dir", directory), **changes)


@pytest.mark.parametrize(
    ("path", "arguments", "error", "message"),
    [
        (3, {}, TypeError, "`export_filepath` names no path"),
        ("best/model", {}, ValueError, r"Expected: one that ends in `\.keras`"),
        ("best/m.keras", {"save_weights_only": True}, ValueError, r"ends in `\.weights\.h5`"),
        ("best/m.keras", {"mode": "least"}, ValueError, "`mode` is not one of its values"),
        ("best/m{.keras", {}, ValueError, "The braces .* do not match"),
        ("best/m{}.keras", {}, ValueError, "has no name"),
    ],
)
def test_an_export_says_what_is_wrong_with_it(path, arguments, error, message):
    with pytest.raises(error, match=rf"{message}.*Received: \w+="):
        kerasps.SidecarEvaluatorModelExport(path, **arguments)
