"""Lanes: `fit` and scheduled functions share few of them, and each update is applied once."""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasps.errors import KeraspsError
from support.unit_gradients import Outputs, compiled_unit_model, unit_model

NUM_EXAMPLES, BATCH_SIZE, CALLS = 64, 4, 6
IDS = np.arange(NUM_EXAMPLES, dtype="int32")[:, None]


@pytest.fixture
def few_lanes(strategy):
    """Returns a function that leaves so many lanes free, until the test ends."""
    fences, taken = strategy.extended.fences, []

    def leave(count):
        gc.collect()  # earlier trainings
        taken.extend(fences._free)
        fences._free.clear()
        # Some that were in use before, as after a long time.
        fences._free.extend(taken.pop() for _ in range(count))

    yield leave
    fences._free.extend(taken)


class Scheduled:
    """A function of a custom loop, and what counts its calls: each weight is minus their number."""

    def __init__(self, strategy):
        self.coordinator = strategy.coordinator
        with strategy.scope():
            self.model = unit_model(NUM_EXAMPLES)
            optimizer, loss_fn = keras.optimizers.SGD(1.0), Outputs(reduction="sum")

        def train(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, self.model(x, training=True))
            weights = self.model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        @tf.function
        def once(ids):
            strategy.run(train, args=(ids, ids))

        @tf.function
        def looped(ids):
            for _ in tf.range(2):
                strategy.run(train, args=(ids, ids))

        self.functions = once, looped
        self.updates = 0

    def call(self, count):
        for _ in range(count):
            for function in self.functions:
                self.coordinator.schedule(function, args=(tf.constant(IDS[:BATCH_SIZE]),))
        self.coordinator.join()
        self.updates += 3 * count

    def applied(self):
        weights = self.model.trainable_variables[1:]
        return {-float(value) for weight in weights for value in np.ravel(weight.numpy())}


def fit(model, strategy, epochs):
    """Fit, with a pass for each epoch; return how many steps there were."""
    data = tf.data.Dataset.from_tensor_slices((IDS, IDS)).batch(BATCH_SIZE)
    model.fit(data, epochs=epochs, verbose=0)
    return epochs * NUM_EXAMPLES // BATCH_SIZE


def test_scheduled_functions_keep_their_lanes_while_many_trainings_take_others(strategy, few_lanes):
    model = compiled_unit_model(strategy, NUM_EXAMPLES, lambda: keras.optimizers.SGD(1.0), 1)
    scheduled = Scheduled(strategy)
    # A worker has two for its calls, one for the training, and another while one is given back.
    few_lanes(4 * strategy.num_workers)
    scheduled.call(CALLS)
    steps = 0
    for _ in range(4):
        steps += fit(model, strategy, epochs=3)
        scheduled.call(2)
        assert scheduled.applied() == {scheduled.updates}
    assert int(model.optimizer.iterations.numpy()) == steps
    assert {-float(v) for w in model.trainable_variables[1:] for v in np.ravel(w.numpy())} == {
        steps
    }
    report = strategy.staleness()
    assert report.pushes % (3 * NUM_EXAMPLES // BATCH_SIZE) == 0
    assert report.pushes


def test_no_free_lane_is_an_error_and_the_strategy_stays_usable(strategy, few_lanes):
    model = compiled_unit_model(strategy, NUM_EXAMPLES, lambda: keras.optimizers.SGD(1.0), 1)
    few_lanes(0)
    with pytest.raises(KeraspsError, match="No lane is free for the updates of a worker"):
        model.fit(IDS, IDS, batch_size=BATCH_SIZE, verbose=0)
    few_lanes(2 * strategy.num_workers)
    model.fit(IDS, IDS, batch_size=BATCH_SIZE, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == NUM_EXAMPLES // BATCH_SIZE


def test_calls_go_on_in_other_lanes_when_their_numbers_are_used_up(strategy, monkeypatch):
    monkeypatch.setattr("kerasps.training.calls.scheduled._CALLS_PER_LANE", 2)
    scheduled = Scheduled(strategy)
    scheduled.call(CALLS)
    assert scheduled.applied() == {scheduled.updates}
