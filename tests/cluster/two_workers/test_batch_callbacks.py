"""How far workers are ahead of the callbacks that are told of batches."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from kerasps.training.sessions.dispatcher import Dispatcher
from support.batch_callbacks import (
    NUM_BATCHES,
    Scheduled,
    Told,
    arrays,
    generator,
    in_turn,
    rates_used,
    rows_model,
)
from support.matrix import with_matrix


@pytest.mark.filterwarnings("ignore:.*lives in this process")
@pytest.mark.parametrize(
    ("moment", "data", "size"), [("begin", arrays, 1), ("end", generator, 1), ("end", generator, 4)]
)
def test_each_rate_that_is_set_is_used_by_one_execution(strategy, moment, data, size):
    model = rows_model(strategy, size)
    model.fit(**data(), verbose=0, callbacks=[Scheduled(moment)])
    behind = (strategy.num_workers - 1) * size
    used = [max(0, step - step % size - behind) for step in range(NUM_BATCHES)]
    assert rates_used(model) == used


@pytest.fixture
def ahead(monkeypatch):
    """How many batches were sent and callbacks not told of, at each send, with the one sent."""
    seen, told, sent = [], Told(), []
    send = Dispatcher.send

    def noted(self, execution):
        sent.append(execution.num_steps)
        seen.append(sum(sent) - sum(moment == "end" for moment, _ in told.calls))
        send(self, execution)

    monkeypatch.setattr(Dispatcher, "send", noted)
    return seen, told


@pytest.mark.parametrize("kind", ["slow", "reading", "checkpoint", "backup"])
def test_no_more_is_ahead_of_callbacks_than_one_execution_per_worker(
    strategy, ahead, kind, tmp_path
):
    seen, told = ahead
    callbacks = [told]
    if kind == "checkpoint":
        path = str(tmp_path / "{batch}.weights.h5")
        callbacks.append(keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_freq=5))
    if kind == "backup":
        callbacks.append(keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=5))
    told.seconds, told.reads = 0.05 * (kind == "slow"), kind == "reading"
    model = rows_model(strategy)
    model.fit(**arrays(), verbose=0, callbacks=callbacks)
    assert told.calls == in_turn(NUM_BATCHES)
    assert max(seen) == strategy.num_workers
    assert rates_used(model) == [0] * NUM_BATCHES
    if kind == "checkpoint":
        assert len([*tmp_path.iterdir()]) == NUM_BATCHES // 5


def test_a_callback_that_reads_leaves_no_worker_idle(strategy, ahead):
    seen, told = ahead
    told.reads = True
    rows_model(strategy).fit(**arrays(), verbose=0, callbacks=[told])
    one_each = [*range(1, strategy.num_workers + 1)]
    assert seen[: 3 * len(one_each)] == one_each * 3


@pytest.mark.parametrize(
    ("size", "seconds"),
    with_matrix([(1, 0.0), (1, 0.05), (2, 0.0), (2, 0.05)], at_length=[(1, 0.0), (2, 0.05)]),
)
def test_a_stop_lets_only_what_is_in_flight_end(strategy, size, seconds):
    model, told = rows_model(strategy, size), Told(seconds=seconds, stop_at=5)
    history = model.fit(**arrays(), epochs=3, verbose=0, callbacks=[told])
    steps = int(model.optimizer.iterations)
    assert history.epoch == [0]
    assert 6 <= steps <= 6 + (strategy.num_workers - 1) * size
    assert sum(rate == 0 for rate in rates_used(model)) == steps
    # Nothing more is told.
    assert told.calls == [
        (moment, last - (size - 1) * (moment == "begin"))
        for last in range(size - 1, 6, size)
        for moment in ("begin", "end")
    ]


def test_stops_of_evaluate_and_predict(strategy, ahead):
    seen, told = ahead
    model = rows_model(strategy)
    weights = np.arange(NUM_BATCHES, dtype="float32")[:, None]
    model.layers[0].set_weights([weights])
    told.stop_at, told.seconds = 5, 0.01
    data = arrays()
    loss = model.evaluate(data["x"], data["y"], batch_size=1, verbose=0, callbacks=[told])
    assert told.calls == in_turn(6)
    assert loss < np.mean(weights)
    assert max(seen) == strategy.num_workers
    told.calls.clear()
    rows = model.predict(data["x"], batch_size=1, verbose=0, callbacks=[told])
    assert told.calls == in_turn(6)
    # As many of the first rows as there is no gap in: one worker may be slower.
    assert 1 <= len(rows) <= 5 + strategy.num_workers
    np.testing.assert_array_equal(rows, weights[: len(rows)])


@pytest.mark.parametrize("size", [1, 10])
def test_no_batch_is_behind_the_last(strategy, size):
    """Plain Keras counts the last execution as whole, so that a bar ends at 30/25."""
    told = []

    class Batches(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            told.append(batch)

        on_test_batch_end = on_predict_batch_end = on_train_batch_end

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=size)
    x, y = np.ones((25 * 4, 2)), np.ones(25 * 4)
    batches = Batches()
    for method, data in ((model.fit, (x, y)), (model.evaluate, (x, y)), (model.predict, (x,))):
        told.clear()
        method(*data, batch_size=4, verbose=0, callbacks=[batches])
        assert max(told) == 24
    told.clear()
    model.fit(x, y, batch_size=4, steps_per_epoch=15, epochs=1, verbose=0, callbacks=[batches])
    assert max(told) == 14
