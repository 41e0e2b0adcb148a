"""Every optimizer that Keras ships, and every option that they share."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from support.compare import assert_equal, regression_data, train_both
from support.matrix import with_matrix
from support.optimizers import NOT_ELEMENTWISE, OPTIMIZERS, RowRatios

OPTIONS = {
    "clipnorm": {"clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.01},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "weight_decay": {"weight_decay": 0.01},
    "ema": {"use_ema": True, "ema_momentum": 0.9},
    "ema_overwrite": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 7},
    "loss_scale_factor": {"loss_scale_factor": 128.0},
    "accumulation": {"gradient_accumulation_steps": 4},
    "accumulation_clipnorm": {"gradient_accumulation_steps": 4, "clipnorm": 0.05},
    "accumulation_global_clipnorm": {"gradient_accumulation_steps": 4, "global_clipnorm": 0.05},
    "accumulation_ema_decay": {
        "gradient_accumulation_steps": 3,
        "use_ema": True,
        "weight_decay": 0.01,
    },
    "schedule": {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.05, 10, 0.5)},
    "schedule_decay": {
        "learning_rate": keras.optimizers.schedules.CosineDecay(0.05, 40),
        "weight_decay": 0.01,
    },
    "callable_rate": {"learning_rate": lambda: 0.02},
}


def model_with(optimizer, steps_per_execution=1, **second):
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(12, activation="tanh", **second),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
    return model


# 50 steps in executions of 7 end with one of a single step.
@pytest.mark.parametrize(
    ("name", "steps_per_execution"),
    with_matrix(
        [*((name, 7) for name in OPTIMIZERS), ("adam", 1), ("adafactor", 1), ("loss_scale", 1)],
        at_length=[
            # Options of others that stay.
            *(("nesterov", 7), ("rmsprop", 7), ("amsgrad", 7), ("adamw", 7), ("momentum", 7)),
            *(("lion", 7), ("adagrad", 7), ("adadelta", 7), ("adafactor", 1), ("loss_scale", 1)),
        ],
    ),
)
def test_optimizer_equals_plain_keras(strategy, name, steps_per_execution):
    before = model_with(OPTIMIZERS[name]()).get_weights()
    plain, ours = train_both(
        strategy, lambda: model_with(OPTIMIZERS[name](), steps_per_execution), regression_data()
    )
    assert_equal(plain, ours)
    assert int(ours.optimizer.iterations.numpy()) == 50
    assert not all(np.array_equal(a, b) for a, b in zip(before, ours.get_weights(), strict=True))


# Each option with one optimizer in turn, and those of accumulation with each of the three: Nadam
# moves a scalar of its own with each update, which accumulation must hold back.
OPTION_OPTIMIZERS = (keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.Nadam)
OPTION_CASES = [
    (name, optimizer)
    for index, name in enumerate(OPTIONS)
    for optimizer in OPTION_OPTIMIZERS
    if name.startswith("accumulation") or optimizer is OPTION_OPTIMIZERS[index % 2]
]
# Of gradients, one that looks at all; of variables, averages and decay; accumulation with a scalar,
# and with what else is with it.
ORDINARY = [
    ("global_clipnorm", keras.optimizers.SGD),
    ("ema_overwrite", keras.optimizers.Adam),
    ("schedule_decay", keras.optimizers.SGD),
    ("callable_rate", keras.optimizers.Adam),
    ("accumulation_global_clipnorm", keras.optimizers.Nadam),
    ("accumulation_ema_decay", keras.optimizers.Adam),
]


@pytest.mark.parametrize(
    ("name", "optimizer"),
    with_matrix(OPTION_CASES, at_length=[case for case in OPTION_CASES if case not in ORDINARY]),
)
def test_option_equals_plain_keras(strategy, name, optimizer):
    options = {"learning_rate": 0.02, **OPTIONS[name]}
    plain, ours = train_both(
        strategy, lambda: model_with(optimizer(**options), 5), regression_data()
    )
    assert_equal(plain, ours)


def test_history_equals_plain_keras(strategy):
    plain, ours = train_both(
        strategy, lambda: model_with("adam", 4), regression_data(), steps=10, epochs=3
    )
    assert list(plain.history.history) == list(ours.history.history)
    assert plain.history.epoch == ours.history.epoch
    assert plain.history.params == ours.history.params
    for name, values in plain.history.history.items():
        assert all(type(value) is float for value in ours.history.history[name])
        np.testing.assert_allclose(ours.history.history[name], values, rtol=1e-5)


HALF_PRECISION = ("bfloat16", "mixed_float16")


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, HALF_PRECISION[index % 2]) for index, name in enumerate(NOT_ELEMENTWISE)),
        pytest.param(NOT_ELEMENTWISE[0], HALF_PRECISION[1], marks=pytest.mark.matrix),
    ],
)
def test_optimizer_that_couples_rows_trains_in_half_precision_as_plain_keras(
    strategy, name, policy
):
    def make():
        # Not built by whoever compares: the first step builds it, from constants of its own.
        model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
        model.compile(OPTIMIZERS[name](), "mse")
        return model

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        plain, ours = train_both(strategy, make, regression_data(), steps=5, epochs=2)
    finally:
        keras.config.set_dtype_policy(before)
    np.testing.assert_allclose(
        ours.history.history["loss"], plain.history.history["loss"], rtol=0.02
    )


def test_a_variable_made_in_a_step_from_its_data_is_refused_by_name(strategy):
    class Making(keras.Model):
        def train_step(self, data):
            self.made = keras.Variable(data[0][0], name="made")
            return {}

    with strategy.scope():
        model = Making()
        model.compile()
    with pytest.raises(
        kerasps.InputError,
        match=r"'made' is made in a step, from a value .* Make the variable in `__init__`",
    ):
        model.fit(*regression_data(), verbose=0)


class Lookahead(keras.optimizers.SGD):
    """Every third step, goes half the way back: it assigns in a condition."""

    def build(self, variables):
        super().build(variables)
        self._slow = self.add_optimizer_variables(variables, "slow")

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        slow = self._slow[self._get_variable_index(variable)]

        def meet():
            self.assign_add(slow, 0.5 * (variable - slow))
            self.assign(variable, slow)

        tf.cond(tf.convert_to_tensor(self.iterations) % 3 == 2, meet, lambda: None)


class ZeroMean(keras.constraints.Constraint):
    """A user's own: it couples all elements."""

    def __call__(self, w):
        return w - keras.ops.mean(w)


def two_optimizers():
    inner = keras.optimizers.OptimizerMap(
        keras.optimizers.Adafactor(0.01), {".*bias": keras.optimizers.Lamb(0.01)}
    )
    return keras.optimizers.MultiOptimizer(inner)


norms = keras.constraints
COUPLED = {
    "max_norm": lambda: model_with(OPTIMIZERS["adam"](), 5, kernel_constraint=norms.MaxNorm(0.5)),
    "min_max_norm": lambda: model_with(
        OPTIMIZERS["adam"](), 5, kernel_constraint=norms.MinMaxNorm(0.3, 0.6, 0.7)
    ),
    "unit_norm": lambda: model_with(
        OPTIMIZERS["momentum"](),
        5,
        kernel_constraint=norms.UnitNorm(None),
        bias_constraint=norms.UnitNorm(-1),
    ),
    "own_constraint": lambda: model_with(OPTIMIZERS["adam"](), 5, kernel_constraint=ZeroMean()),
    "own_optimizer": lambda: model_with(RowRatios(0.05), 5),
    "condition": lambda: model_with(Lookahead(0.05, momentum=0.9), 5),
    "accumulation_clipnorm": lambda: model_with(
        keras.optimizers.Adam(0.02, gradient_accumulation_steps=4, clipnorm=0.05), 5
    ),
    "accumulation": lambda: model_with(
        keras.optimizers.Adafactor(
            0.02, gradient_accumulation_steps=4, global_clipnorm=0.05, weight_decay=0.1
        ),
        5,
    ),
    "ema": lambda: model_with(
        keras.optimizers.Lamb(
            0.02, clipnorm=0.5, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7
        ),
        5,
    ),
    "loss_scale": lambda: model_with(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Lamb(0.01), dynamic_growth_steps=10), 5
    ),
}
if hasattr(keras.optimizers, "MultiOptimizer"):
    COUPLED["multi_optimizer"] = lambda: model_with(two_optimizers(), 5)


@pytest.mark.parametrize(
    "name",
    with_matrix(
        COUPLED,
        at_length=[
            *("min_max_norm", "unit_norm", "own_constraint", "accumulation", "ema", "loss_scale"),
            *("accumulation_clipnorm", "own_optimizer"),
        ],
    ),
)
def test_what_couples_rows_equals_plain_keras_on_whole_variables(strategy, name):
    plain, ours = train_both(strategy, COUPLED[name], regression_data())
    assert {len(v.shards) for v in ours.trainable_variables} == {1}
    assert_equal(plain, ours)


# By 40 bytes, a kernel and a bias of each layer but the last are split.
SPLIT_FROM = 40
REFUSED = {
    **COUPLED,
    **{name: lambda name=name: model_with(OPTIMIZERS[name]()) for name in NOT_ELEMENTWISE},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_couples_rows_is_refused_by_name_in_shards(strategy, sharded, name):
    sharded(3, SPLIT_FROM)
    with strategy.scope():
        model = REFUSED[name]()
    before = model.get_weights()
    with pytest.raises(
        kerasps.UnsupportedError,
        match=r"couples the rows of '.*(kernel|bias)', which is in 3 shards.* Keep such variables",
    ):
        model.fit(*regression_data(), batch_size=16, verbose=0)
    # Nothing has changed, and with another optimizer it trains.
    for expected, actual in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert int(model.optimizer.iterations) == 0
    if name == "adafactor":
        model.compile("adam", "mse")
        model.fit(*regression_data(), batch_size=16, verbose=0)


def test_slots_of_other_shapes_lie_beside_their_variable_and_are_saved(strategy, tmp_path):
    def fit(model, steps):
        model.fit(
            *regression_data(), batch_size=16, shuffle=False, steps_per_epoch=steps, verbose=0
        )

    plain, ours = train_both(
        strategy, lambda: model_with(OPTIMIZERS["adafactor"]()), regression_data(), steps=20
    )
    kernel = ours.layers[1].kernel
    index = ours.optimizer._get_variable_index(kernel)
    rows, columns = ours.optimizer._r[index], ours.optimizer._c[index]
    held = strategy.placement()
    for slot in (rows, columns):
        assert len(slot.shards) == 1
        assert slot.device == kernel.shards[0].device
        assert slot.shards[0].name in {task.device: task for task in held}[slot.device].names
    ours.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    for model in (plain, loaded):
        fit(model, 20)
    assert_equal(plain, loaded)


class Neighbours(keras.optimizers.SGD):
    """Looks at another variable's slot."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient + 0.0 * self.momentums[1][0], variable, learning_rate)


def test_an_update_that_needs_another_variable_is_refused_by_name(strategy, sharded):
    sharded(2)
    with strategy.scope():
        model = model_with(Neighbours(0.1, momentum=0.9))
    with pytest.raises(
        kerasps.UnsupportedError,
        match=r"another variable to update '.*/kernel', which is in shards.*parallel",
    ):
        model.fit(*regression_data(), steps_per_epoch=2, batch_size=16, verbose=0)


def test_slots_that_the_first_trace_leaves_on_another_ps_are_moved(strategy):
    # Layers so large that each ps has some of them.
    def make():
        layers = [keras.layers.Dense(300, activation="tanh") for _ in range(3)]
        model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
        model.compile(OPTIMIZERS["adafactor"](), "mse")
        return model

    plain, ours = train_both(strategy, make, regression_data(), steps=5)
    assert_equal(plain, ours)
