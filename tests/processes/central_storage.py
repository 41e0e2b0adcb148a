"""Trains under a CentralStorageStrategy and under TensorFlow's MirroredStrategy, on logical CPUs.

python central_storage.py GROUP DIRECTORY

Each case is done under both, from the same seeds, and returns arrays. Reports by case how far the
arrays are apart, or which errors came. The group `beside` does the same with a cluster connected.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[1]))

from scenario import print_report

import kerasps
from kerasps.hooks import patch
from support.optimizers import OPTIMIZERS

COMPUTE, PARAMETERS = ["CPU:1", "CPU:2"], "CPU:0"
GROUPS = ("models", "ways", "loops", "beside")
CASES: dict[str, dict[str, object]] = {group: {} for group in GROUPS}
DIRECTORY = Path(sys.argv[2])
L = keras.layers

generator = np.random.default_rng(0)
X = generator.normal(size=(150, 8)).astype("float32")
Y = np.tanh(X[:, :1]) + 0.1 * X[:, 1:2]
IDS = generator.integers(0, 20, size=(150, 6))
IMAGES = generator.normal(size=(150, 6, 6, 1)).astype("float32")
LABELS = generator.integers(0, 3, size=150)


def case(group):
    def add(function):
        CASES[group][function.__name__] = function
        return function

    return add


def dense(*inner, **compiled):
    model = keras.Sequential([keras.Input((8,)), L.Dense(6, activation="tanh"), *inner, L.Dense(1)])
    model.compile(**{"optimizer": keras.optimizers.Adam(0.02), "loss": "mse", **compiled})
    return model


def state(model, history=None, **others):
    """All that a training leaves: weights, slots, counters, seeds, and what was logged."""
    logs = {} if history is None else history.history
    optimizer = getattr(model, "optimizer", None)
    return {
        **{f"weight {i}": np.asarray(v) for i, v in enumerate(model.variables)},
        **{f"slot {i}": np.asarray(v) for i, v in enumerate(getattr(optimizer, "variables", ()))},
        **{f"log {name}": np.asarray(values) for name, values in logs.items()},
        **others,
    }


def fitted(model, x=X, y=Y, **arguments):
    """Fit; the last batch is a part of one, in halves that are not equal."""
    options = {"batch_size": 32, "verbose": 0, "shuffle": False, **arguments}
    return state(model, model.fit(x[:149], y[:149], **options))


def fully_used(model, x=X, y=Y, **arguments):
    """Fit with validation, evaluate and predict."""
    found = fitted(model, x, y, epochs=2, validation_data=(x[:45], y[:45]), **arguments)
    found["evaluated"] = np.asarray(model.evaluate(x[:43], y[:43], batch_size=16, verbose=0))
    found["predicted"] = model.predict(x[:43], batch_size=16, verbose=0)
    return found


# What models are made of.


@case("models")
def regularized_and_constrained(strategy):
    with strategy.scope():
        layer = L.Dense(4, kernel_regularizer="l2", kernel_constraint="max_norm")
        return fitted(dense(layer, metrics=["mae"]))


@case("models")
def convolutions_with_batch_normalization_and_dropout(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                L.Conv2D(4, 3, use_bias=False),
                L.BatchNormalization(momentum=0.9),
                L.ReLU(),
                L.Flatten(),
                L.Dropout(0.3),
                L.GaussianNoise(0.1),
                L.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        return fully_used(model, IMAGES, LABELS)


@case("models")
def embeddings(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((6,), dtype="int64"), L.Embedding(20, 4), L.Flatten(), L.Dense(1)]
        )
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        return fitted(model, IDS, Y)


def train_with(optimizer):
    """Steps of one's own around an optimizer: cheap to trace, so that there can be many."""

    def train(strategy):
        with strategy.scope():
            made = optimizer()
            table = keras.Variable(X[:12, :4], name="table")
            kernel = keras.Variable(X[12:16, :3], name="kernel")
            variables = [table, kernel]
            made.build(variables)

        def replica(ids):
            with tf.GradientTape() as tape:
                rows = tf.gather(table.value, ids)
                loss = tf.reduce_mean(tf.square(tf.matmul(rows, kernel) - 1.0)) / 2
                scaled = made.scale_loss(loss)
            made.apply(tape.gradient(scaled, [table.value, kernel.value]))
            return loss

        @tf.function
        def step(ids):
            return strategy.run(replica, args=(ids,))

        # Each replica has ids of its own, some of them twice.
        ids = strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(IDS[context.replica_id_in_sync_group] % 12)
        )
        losses = [strategy.experimental_local_results(step(ids)) for _ in range(6)]
        made.finalize_variable_values(variables)
        return {
            "losses": np.asarray(losses),
            **{v.path: np.asarray(v) for v in (*variables, *made.variables)},
        }

    return train


SGD = keras.optimizers.SGD
OPTIONS = {
    "clipped": lambda: SGD(0.1, momentum=0.9, clipnorm=0.1),
    "clipped globally": lambda: SGD(0.1, global_clipnorm=0.1),
    "averaged": lambda: SGD(0.1, use_ema=True, ema_momentum=0.9),
    "averaged every third step": lambda: SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "scheduled": lambda: SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "accumulated": lambda: SGD(0.1, gradient_accumulation_steps=2),
}
# The others differ from these in options alone.
ALIKE = ("sgd", "nesterov", "rmsprop", "adam")
for name, make in {**OPTIMIZERS, **OPTIONS}.items():
    if name not in ALIKE:
        CASES["loops"][f"optimizer {name}"] = train_with(make)


# Ways to train.


@case("ways")
def several_steps_per_execution(strategy):
    # TensorFlow's mirrored strategy fails with more than one.
    steps = 3 if isinstance(strategy, kerasps.CentralStorageStrategy) else 1
    with strategy.scope():
        model = dense(metrics=["mae"], steps_per_execution=steps)
    return fitted(model, epochs=2)


@case("ways")
def sample_weights_and_metrics_made_outside(strategy):
    outside = keras.metrics.MeanAbsoluteError(name="outside")
    with strategy.scope():
        model = dense(metrics=[keras.metrics.RootMeanSquaredError(name="inside"), outside])
    return fitted(model, sample_weight=np.linspace(0.1, 2.0, 149))


@case("ways")
def a_first_batch_that_devices_cannot_share(strategy):
    with strategy.scope():
        return fitted(dense(), batch_size=31)


@case("ways")
def compiled_by_xla(strategy):
    with strategy.scope():
        model = dense(jit_compile=True)
    return fitted(model)


@case("loops")
def a_function_compiled_by_xla(strategy):
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    function = tf.function(lambda: variable.assign_add(1.0), jit_compile=True)
    strategy.run(function)
    return {"value": variable.numpy()}


@case("loops")
def a_shared_variable_in_control_flow(strategy):
    with strategy.scope():
        variable = tf.Variable(1.0)

    def replica():
        add = lambda: variable.assign_add(1.0)  # noqa: E731
        tf.cond(variable > 0.0, add, lambda: variable + 0.0)

    tf.function(lambda: strategy.run(replica))()
    return {"value": variable.numpy()}


@case("ways")
def eager(strategy):
    with strategy.scope():
        model = dense(L.Dropout(0.2), run_eagerly=True)
    return fitted(model)


@case("ways")
def unequal_batches(strategy):
    def batches():
        for size in (16, 5, 7, 1, 30):
            yield X[:size], Y[:size]

    signature = (tf.TensorSpec((None, 8)), tf.TensorSpec((None, 1), tf.float64))
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    # Where the end is not known, Keras may count the steps one too far, without a strategy too.
    data = data.apply(tf.data.experimental.assert_cardinality(5))
    with strategy.scope():
        model = dense()
    return state(model, model.fit(data, epochs=2, verbose=0))


@case("ways")
def a_train_step_of_ones_own(strategy):
    class Averaging(keras.Model):
        """Its step moves a copy of its weights after them, and counts for itself."""

        def __init__(self):
            super().__init__()
            self.inner, self.slow = L.Dense(1), L.Dense(1)
            self.tracker = keras.metrics.Mean(name="own")
            self.seen = self.add_weight(
                shape=(), initializer="zeros", aggregation="sum", trainable=False
            )

        def call(self, x):
            return self.inner(x) + 0.0 * self.slow(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.inner.trainable_variables)
            self.optimizer.apply(gradients, self.inner.trainable_variables)
            for slow, fast in zip(self.slow.weights, self.inner.weights, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
            self.seen.assign_add(tf.cast(tf.shape(x)[0], "float32"))
            self.tracker.update_state(loss)
            return {"own": self.tracker.result()}

    with strategy.scope():
        model = Averaging()
        model.compile("adam", "mse")
    return fitted(model, epochs=2)


@case("ways")
def saved_and_loaded(strategy):
    directory = DIRECTORY / type(strategy).__name__
    directory.mkdir()
    files = [str(directory / name) for name in ("model.keras", "w.weights.h5", "ckpt", "exported")]
    with strategy.scope():
        model = dense(L.BatchNormalization(), metrics=["mae"])
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    fitted(model)
    model.save(files[0])
    model.save_weights(files[1])
    path = checkpoint.save(files[2])
    model.export(files[3], verbose=False)
    after = fitted(model)
    checkpoint.restore(path).assert_consumed()
    restored = fitted(model)
    with strategy.scope():
        loaded = keras.models.load_model(files[0])
    # From each of them, training goes on as it did after they were written.
    for again in (restored, fitted(loaded)):
        differing = [n for n, v in again.items() if not np.allclose(after[n], v)]
        assert differing == [], differing
    model.load_weights(files[1])
    exported = tf.saved_model.load(files[3])
    predicted = [
        model.predict(X, verbose=0),
        keras.models.load_model(files[0]).predict(X, verbose=0),
        exported.serve(X).numpy(),
    ]
    assert np.allclose(predicted[0], predicted[1:], atol=1e-6)
    return {**after, "predicted": predicted[0]}


# Loops of one's own, and the strategy's own methods.


@case("loops")
def methods_of_the_strategy(strategy):
    data = tf.data.Dataset.range(11).map(lambda i: tf.cast(i, tf.float32)).batch(4)
    found = {}

    @tf.function
    def run(x):
        return strategy.run(lambda part: part * 2.0, args=(x,))

    for i, x in enumerate(strategy.experimental_distribute_dataset(data)):
        doubled = run(x)
        found[f"sum {i}"] = strategy.reduce(tf.distribute.ReduceOp.SUM, doubled, axis=0)
        found[f"mean {i}"] = strategy.reduce("MEAN", doubled, axis=0)
        found[f"gathered {i}"] = strategy.gather(doubled, axis=0)
        for replica, part in enumerate(strategy.experimental_local_results(doubled)):
            found[f"part {i} {replica}"] = part

    def dataset_fn(context):
        return data.unbatch().batch(context.get_per_replica_batch_size(4))

    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(float(context.replica_id_in_sync_group))
    )
    made = strategy.distribute_datasets_from_function(dataset_fn)
    found["made"] = [strategy.reduce("SUM", run(x), axis=0) for x in made]
    found["values"] = strategy.reduce("SUM", values, axis=None)
    found["replicas"] = strategy.num_replicas_in_sync

    @tf.function
    def gathered_within():
        def replica():
            context = tf.distribute.get_replica_context()
            rank = tf.cast(context.replica_id_in_sync_group, tf.float32)
            return context.all_gather(rank[None], 0), context.all_reduce("MEAN", [rank, rank + 1])

        return strategy.run(replica)

    found |= {
        f"within {i}": strategy.experimental_local_results(value)[1]
        for i, value in enumerate(tf.nest.flatten(gathered_within()))
    }
    return {name: np.asarray(value) for name, value in found.items()}


@case("loops")
def bare_variables(strategy):
    kinds = tf.VariableAggregation
    with strategy.scope():
        made = {
            str(kind): tf.Variable([1.0, 2.0], aggregation=kind)
            for kind in (kinds.NONE, kinds.SUM, kinds.MEAN, kinds.ONLY_FIRST_REPLICA)
        }
        made["on read"] = tf.Variable(
            [0.0, 0.0], synchronization=tf.VariableSynchronization.ON_READ, aggregation=kinds.SUM
        )
        made["own"] = tf.Variable([0, 0], trainable=False)
        with strategy.extended.colocate_vars_with(made[str(kinds.NONE)]):
            made["beside"] = tf.Variable([5.0, 6.0], trainable=False)

    def replica():
        context = tf.distribute.get_replica_context()
        rank = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
        before = [tf.identity(variable) for variable in made.values()]
        for name, variable in made.items():
            if name == "own":  # each replica's, so it may be assigned anywhere
                tf.cond(rank > 0, lambda v=variable: v.assign_add([1, 2]), lambda v=variable: v + 0)
            else:
                variable.assign_add(rank * [1.0, 1.0])
                variable.assign(2.0 * variable)
        scattered = tf.IndexedSlices(tf.constant([7.0]), tf.constant([1]), tf.constant([2]))
        made[str(kinds.NONE)].scatter_update(scattered)
        return before

    @tf.function
    def run():
        return strategy.run(replica)

    read = [strategy.experimental_local_results(value) for _ in range(3) for value in run()]
    made["beside"].assign_sub([1.0, 1.0])
    found = {name: variable.numpy() for name, variable in made.items()}
    # Of one that has no aggregation, each mirrored replica goes on from its own value.
    first = [np.asarray(values[0]) for values in read]
    return {**found, "read": np.concatenate(first)}


# With a cluster connected, and its hooks installed.

CASES["beside"] = {
    "saved_and_loaded": saved_and_loaded,
    "optimizer loss_scale": CASES["loops"]["optimizer loss_scale"],
}


def outcome(train, strategy):
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    try:
        return train(strategy), None
    except Exception as exc:
        return None, f"{type(exc).__name__}: {exc}"


def compared(train, mirrored, central):
    (expected, mirrored_error), (got, central_error) = (
        outcome(train, strategy) for strategy in (mirrored, central)
    )
    if expected is None or got is None:
        return {"mirrored": mirrored_error, "central": central_error}
    assert list(expected) == list(got)
    apart = {
        name: float(np.max(np.abs(np.subtract(value, got[name], dtype="float64")), initial=0.0))
        for name, value in expected.items()
    }
    finite = all(np.isfinite(value).all() for value in got.values())
    worst = max(apart, key=apart.get)
    return {"apart": apart[worst], "worst": worst, "finite": finite, "values": len(apart)}


def devices(strategy):
    """The device of each value of a model that was trained, by what it belongs to."""
    with strategy.scope():
        model = dense(L.BatchNormalization(), L.Dropout(0.1), metrics=["mae"])
        frozen = L.Embedding(3, 2, trainable=False)
        frozen.build()
    fitted(model)
    kinds = {
        "weights": model.trainable_variables + frozen.weights,
        "slots": [v for v in model.optimizer.variables if v.ndim > 0],
        "counters": [model.optimizer.iterations, model.optimizer._learning_rate],
        "state": model.non_trainable_variables,
        "metrics": model.metrics_variables,
    }
    return {
        kind: sorted({tuple(v.device[-5:] for v in variable.value.values) for variable in found})
        for kind, found in kinds.items()
    }


def lookup_devices(strategy):
    """Where rows of a table are looked up: by a layer as it is, and within `tf.device`."""
    with strategy.scope():
        layer = L.Embedding(20, 4)
        layer.build()

    def replica(scope):
        with tf.GradientTape() as tape, scope():
            loss = tf.reduce_sum(layer(IDS[:4]))
        return tape.gradient(loss, layer.embeddings.value).values

    found = []
    for scope in (contextlib.nullcontext, lambda: tf.device(strategy.parameter_device)):
        function = tf.function(lambda scope=scope: strategy.run(replica, args=(scope,)))
        graph = function.get_concrete_function().graph
        found.append({op.device[-5:] for op in graph.get_operations() if "Gather" in op.type})
    return [sorted(devices) for devices in found]


def apart_from_one_process(central):
    """How far two replicas are from plain Keras on the whole batches."""

    def train(strategy):
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = dense(metrics=["mae"])
        return fitted(model, X[:128], Y[:128])

    plain, got = train(tf.distribute.get_strategy()), train(central)
    return max(float(np.max(np.abs(plain[name] - got[name]))) for name in plain)


def main(group):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
    # One for all cases: TensorFlow's collectives of a second one would meet those of the first.
    mirrored = tf.distribute.MirroredStrategy(COMPUTE)
    cluster = None
    if group == "beside":
        cluster = kerasps.LocalCluster(num_workers=1, num_ps=1)
        kerasps.ParameterServerStrategy(cluster.cluster_resolver)
    central = kerasps.CentralStorageStrategy(COMPUTE, PARAMETERS)
    report = {"cases": {n: compared(c, mirrored, central) for n, c in CASES[group].items()}}
    report["hooks"] = len(patch._installed)
    if group == "models":
        report["devices"] = devices(central)
        report["apart_from_one_process"] = apart_from_one_process(central)
    if group == "loops":
        report["lookup_devices"] = lookup_devices(central)
    if cluster is not None:
        cluster.close()
    print_report(report)


if __name__ == "__main__":
    main(sys.argv[1])
