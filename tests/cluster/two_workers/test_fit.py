"""`fit` with two workers: exact counts, callbacks, History."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
import kerasps.training.loop.batch_callbacks
from kerasps.training.sessions.dispatcher import Dispatcher
from kerasps.variables.placing.placement import PlacementLedger
from support.executions import sent_sizes
from support.matrix import with_matrix
from support.models import Batches, counting_model, endless, ids_data


# 50 steps in executions of 7 end with one of a single step; 50 at once are a loop on the worker.
@pytest.mark.parametrize("steps_per_execution", with_matrix([7, 50], at_length=[50]))
def test_counts_are_exact_in_every_epoch(strategy, steps_per_execution):
    model = counting_model(strategy, steps_per_execution)
    history = model.fit(kerasps.DatasetCreator(endless), epochs=3, steps_per_epoch=50, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 150
    assert history.history["batches"] == [50.0] * 3
    assert history.history["examples"] == [400.0] * 3
    assert history.epoch == [0, 1, 2]


@pytest.fixture
def sent(monkeypatch):
    return sent_sizes(monkeypatch)


def test_several_workers_are_given_no_more_steps_than_were_asked_for(strategy, sent):
    model = counting_model(strategy, steps_per_execution=2)
    model.fit(kerasps.DatasetCreator(endless), epochs=3, steps_per_epoch=100, verbose=0)
    assert set(sent) == {2}


@pytest.mark.parametrize("knows_length", with_matrix([True, False], at_length=[True]))
def test_longer_executions_read_each_batch_once(strategy, sent, knows_length):
    model = counting_model(strategy, steps_per_execution=1)
    dataset = tf.data.Dataset.from_tensor_slices(ids_data(437 * 8)).batch(8)
    if not knows_length:
        dataset = dataset.filter(lambda *_: True)
    for _ in range(3):
        logs = model.evaluate(dataset, verbose=0, return_dict=True)
        assert (logs["batches"], logs["examples"]) == (437, 437 * 8)
        assert logs["ids"] == sum(range(437 * 8))
    assert sent[0] == 1
    assert 10 in sent


class Steps(keras.metrics.Metric):
    """Counts steps; its result is its variable."""

    def __init__(self):
        super().__init__(name="steps")
        self._steps = self.add_weight(shape=(), initializer="zeros", name="steps")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self._steps.assign_add(1.0)

    def result(self):
        return self._steps


def test_a_metric_that_returns_its_variable_does_not_have_steps_wait(strategy, monkeypatch):
    suspended = []
    suspend = Dispatcher.suspend
    monkeypatch.setattr(Dispatcher, "suspend", lambda self: suspended.append(self) or suspend(self))
    monkeypatch.setattr(kerasps.training.loop.batch_callbacks, "_PROGRESS_INTERVAL_S", 0.0)
    model = counting_model(strategy, steps_per_execution=1)
    with strategy.scope():
        model.compile("sgd", "mse", metrics=[Steps()])
    history = model.fit(kerasps.DatasetCreator(endless), epochs=2, steps_per_epoch=50, verbose=0)
    assert history.history["steps"] == [50.0] * 2
    assert not suspended


def test_no_two_workers_draw_the_same_seed(strategy):
    class Drawing(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.generator = keras.random.SeedGenerator(11)
            self.drawn = keras.metrics.Sum(name="drawn")

        def call(self, x, training=False):
            if training:
                self.drawn.update_state(keras.random.uniform((), seed=self.generator))
            return self.dense(x)

    def run(make):
        model = make()
        model.compile("sgd", "mse", steps_per_execution=4 if model._distribute_strategy else 1)
        return model

    plain = run(Drawing)
    plain.fit(*ids_data(16), batch_size=1, epochs=5, verbose=0)
    with strategy.scope():
        ours = run(Drawing)
    history = ours.fit(kerasps.DatasetCreator(endless), steps_per_epoch=16, epochs=5, verbose=0)
    # Plain Keras draws one seed a step; were one drawn twice, or left out, the sums would differ.
    np.testing.assert_allclose(history.history["drawn"], plain.history.history["drawn"], rtol=1e-5)
    np.testing.assert_array_equal(ours.generator.state.numpy(), plain.generator.state.numpy())


class Recorder(keras.callbacks.Callback):
    def __init__(self, stop_at=None):
        super().__init__()
        self.calls, self.stop_at = [], stop_at

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("end", batch, dict(logs)))
        if self.stop_at is not None and batch >= self.stop_at:
            self.model.stop_training = True


def test_batch_callbacks_see_the_metrics_so_far(strategy):
    model, recorder = counting_model(strategy, 5), Recorder()
    model.fit(kerasps.DatasetCreator(endless), steps_per_epoch=18, verbose=0, callbacks=[recorder])
    ends = [call for call in recorder.calls if call[0] == "end"]
    assert [call[0] for call in recorder.calls] == ["begin", "end"] * 4
    assert [end[2]["batches"] for end in ends[:-1]] == [end[1] + 1 for end in ends[:-1]]
    assert ends[-1][2]["batches"] == 18
    assert ends[-1][1] in (
        17,
        19,
    )  # an execution of 3 steps that comes last counts as 5, as in plain Keras
    assert sorted(np.diff([0, *[end[2]["batches"] for end in ends]])) == [3, 5, 5, 5]


def test_stop_training_is_honoured_within_the_executions_in_flight(strategy):
    model, recorder = counting_model(strategy, 2), Recorder(stop_at=9)
    history = model.fit(
        kerasps.DatasetCreator(endless),
        epochs=5,
        steps_per_epoch=1000,
        verbose=0,
        callbacks=[recorder],
    )
    in_flight = 3 * 2 * 2  # executions per worker, workers, steps per execution
    assert history.epoch == [0]
    assert 10 <= history.history["batches"][0] <= 10 + in_flight
    assert int(model.optimizer.iterations.numpy()) == history.history["batches"][0]


def test_validation_data_and_early_stopping(strategy):
    model = counting_model(strategy, 5)
    callback = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=1e9)
    history = model.fit(
        kerasps.DatasetCreator(endless),
        epochs=9,
        steps_per_epoch=10,
        validation_data=ids_data(33),
        validation_batch_size=8,
        callbacks=[callback],
        verbose=0,
    )
    assert list(history.history) == [
        "batches", "examples", "ids", "loss", "squares",
        "val_batches", "val_examples", "val_ids", "val_loss", "val_squares",
    ]  # fmt: skip
    assert history.history["val_examples"] == [33.0, 33.0]
    assert history.history["val_ids"] == [sum(range(33))] * 2
    assert history.epoch == [0, 1]


def test_progress_bar_shows_the_last_step(strategy, capsys):
    model = counting_model(strategy, 4)
    model.fit(kerasps.DatasetCreator(endless), steps_per_epoch=10, verbose=1)
    printed = capsys.readouterr().out
    assert "10/10" in printed
    assert "batches: 10" in printed
    model.fit(kerasps.DatasetCreator(endless), steps_per_epoch=10, verbose=2)
    assert "10/10 - " in capsys.readouterr().out


def test_initial_epoch_and_second_fit_go_on(strategy):
    model = counting_model(strategy, 3)
    history = model.fit(
        kerasps.DatasetCreator(endless), initial_epoch=2, epochs=4, steps_per_epoch=5, verbose=0
    )
    assert history.epoch == [2, 3]
    model.fit(kerasps.DatasetCreator(endless), steps_per_epoch=5, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 15


def test_class_weight_and_sample_weight(strategy):
    x, _ = ids_data(64)
    labels = (np.arange(64) % 2).astype("int32")

    def train(weights):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((2,)), keras.layers.Dense(2, "softmax", kernel_initializer="zeros")]
            )
            model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
        return model.fit(x, labels, batch_size=8, verbose=0, **weights).history["loss"][0]

    plain = train({})
    assert train({"class_weight": {0: 2.0, 1: 2.0}}) == pytest.approx(2 * plain, rel=1e-5)
    assert train({"class_weight": {0: 1.0, 1: 0.0}}) == pytest.approx(plain / 2, rel=1e-5)
    assert train({"sample_weight": np.full(64, 3.0, "float32")}) == pytest.approx(
        3 * plain, rel=1e-5
    )


def test_two_workers_learn(strategy):
    x, _ = ids_data(256)
    y = x @ np.array([[2.0], [-1.0]], "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", steps_per_execution=4)
    history = model.fit(x, y, batch_size=16, epochs=12, verbose=0)
    assert history.history["loss"][-1] < 1e-3 * history.history["loss"][0]


def test_an_error_of_the_step_reaches_the_user_and_leaves_the_strategy_usable(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(3, 1), keras.layers.Flatten()]
        )
        model.compile("sgd", "mse")
    bad = np.full((16, 2), 99, "int32")
    with pytest.raises(kerasps.InputError, match=r"3 rows.*Received: id 99"):
        model.fit(bad, np.zeros((16, 2), "float32"), batch_size=4, verbose=0)
    model.fit(bad % 3, np.zeros((16, 2), "float32"), batch_size=4, verbose=0)
    model = counting_model(strategy)
    assert model.fit(kerasps.DatasetCreator(endless), steps_per_epoch=6, verbose=0).history[
        "batches"
    ] == [6.0]


def test_a_callback_that_raises_leaves_the_strategy_usable(strategy):
    class Broken(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch > 4:
                raise RuntimeError("mine")

    model = counting_model(strategy)
    with pytest.raises(RuntimeError, match="mine"):
        model.fit(
            kerasps.DatasetCreator(endless), steps_per_epoch=50, verbose=0, callbacks=[Broken()]
        )
    pushed = int(model.optimizer.iterations.numpy())
    history = model.fit(*ids_data(100), batch_size=10, verbose=0)
    assert history.history["examples"] == [100.0]
    assert int(model.optimizer.iterations.numpy()) == pushed + 10


def test_a_callback_that_raises_while_a_worker_has_no_data_left(strategy):
    class Broken(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 20:
                raise RuntimeError("mine")

    def uneven(context):
        dataset = tf.data.Dataset.from_tensor_slices(ids_data(200))
        return dataset.take(8 if context.input_pipeline_id == 0 else 200).batch(8)

    model = counting_model(strategy)
    with pytest.raises(RuntimeError, match="mine"):
        model.fit(kerasps.DatasetCreator(uneven), verbose=0, callbacks=[Broken()])
    history = model.fit(kerasps.DatasetCreator(uneven), steps_per_epoch=26, verbose=0)
    assert history.history["examples"] == [208.0]


def test_metric_that_the_model_does_not_know_is_counted(strategy):
    class Hidden(keras.Sequential):
        def train_step(self, data):
            outside.update_state(data[1], None)
            return super().train_step(data)

    with strategy.scope():
        outside = Batches()
        model = Hidden([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=3)
    model.fit(kerasps.DatasetCreator(endless), epochs=2, steps_per_epoch=7, verbose=0)
    assert float(outside.result()) == 14


def test_placement_is_balanced_and_prints(strategy, monkeypatch):
    # Without what earlier tests have left, which Python collects when it likes.
    monkeypatch.setattr(strategy.extended, "ledger", PlacementLedger(2))
    with strategy.scope():
        layers = [keras.layers.Dense(300) for _ in range(8)]
        model = keras.Sequential([keras.Input((300,)), *layers])
        model.compile("adam", "mse")
    before = strategy.placement()
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    placement = strategy.placement()
    assert placement.num_bytes - before.num_bytes >= 2 * sum(
        v.numpy().nbytes for v in model.trainable_variables
    )
    sizes = [task.num_bytes for task in placement]
    assert max(sizes) <= 1.1 * np.mean(sizes)
    for slot, variable in zip(model.optimizer._momentums, model.trainable_variables, strict=True):
        assert slot.device == variable.device
    assert str(placement).splitlines()[0].split() == ["ps", "variables", "bytes", "share", "device"]
    assert "/job:ps/replica:0/task:1/device:CPU:0" in str(placement)
    with strategy.scope():
        by_hand = tf.Variable(tf.zeros([100, 3]))
    assert "/job:ps" in by_hand.device
    assert strategy.placement().num_bytes == placement.num_bytes + 1200
