"""Training loops of the user, on the `ClusterCoordinator`: with one worker as in plain Keras."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework.dataset_options_pb2 import Options

from kerasps import _compat
from kerasps.errors import InputError, UnsupportedError
from kerasps.inputs import quickly_deleted
from support.matrix import with_matrix
from support.optimizers import NOT_ELEMENTWISE, OPTIMIZERS

NUM_ROWS, BATCH_SIZE, STEPS = 32, 8, 20
RANDOM = np.random.default_rng(0)
# Each batch looks every row up, once: an update of rows is that of the whole table.
IDS = np.concatenate([RANDOM.permutation(NUM_ROWS).reshape(BATCH_SIZE, 4) for _ in range(20)])
X = RANDOM.normal(size=(len(IDS), 8)).astype("float32")
Y = np.tanh(X.sum(1, keepdims=True)).astype("float32")


def dataset_fn(context=None):
    data = ((IDS.astype("int32"), X), Y)
    return tf.data.Dataset.from_tensor_slices(data).repeat().batch(BATCH_SIZE)


class Parts:
    """A model with a table, dense variables, statistics and dropout, and what trains it."""

    def __init__(self, make_optimizer):
        keras.utils.set_random_seed(3)
        ids, x = keras.Input((4,), dtype="int32"), keras.Input((8,))
        rows = keras.layers.Flatten()(keras.layers.Embedding(NUM_ROWS, 4)(ids))
        hidden = keras.layers.Dense(16, activation="tanh")(keras.layers.Concatenate()([rows, x]))
        hidden = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization()(hidden))
        self.model = keras.Model([ids, x], keras.layers.Dense(1)(hidden))
        self.optimizer = make_optimizer()
        self.metric = keras.metrics.MeanSquaredError()
        self.loss = keras.losses.MeanSquaredError(reduction="none")

    def train(self, inputs, labels):
        with tf.GradientTape() as tape:
            predicted = self.model(inputs, training=True)
            loss = tf.nn.compute_average_loss(self.loss(labels, predicted))
        weights = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.metric.update_state(labels, predicted)
        return loss

    def state(self):
        variables = [*self.model.variables, *self.optimizer.variables]
        return [v.numpy() for v in variables], float(self.metric.result())


def as_documented(strategy, train):
    @tf.function
    def function(iterator):
        losses = strategy.run(train, args=next(iterator))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return function, 1


def given_the_iterator(strategy, train):
    @tf.function
    def function(iterator):
        return strategy.run(lambda batches: train(*next(batches)), args=(iterator,))

    return function, 1


def without_run(strategy, train):
    @tf.function
    def function(iterator):
        return train(*next(iterator))

    return function, 1


def by_closure(strategy, train):
    @tf.function
    def function(iterator):
        inputs, labels = next(iterator)
        return strategy.run(lambda: train(inputs, labels))

    return function, 1


def in_functions(strategy, train):
    inner = tf.function(train)

    @tf.function
    def around(inputs, labels):
        return strategy.run(inner, kwargs={"inputs": inputs, "labels": labels})

    @tf.function
    def function(iterator):
        return around(*next(iterator))

    return function, 1


def looped(strategy, train):
    @tf.function
    def function(iterator):
        loss = tf.constant(0.0)
        for _ in tf.range(5):
            loss = strategy.run(train, args=next(iterator))
        return loss

    return function, 5


KINDS = [as_documented, given_the_iterator, without_run, by_closure, in_functions, looped]


def train_plainly(make_optimizer):
    # Else the test that has it deleted, some later one, may wait for as long as it has lived.
    parts, iterator = Parts(make_optimizer), iter(quickly_deleted(dataset_fn()))
    # In a trace, plain Keras would do what `build` assigns in each step.
    parts.optimizer.build(parts.model.trainable_variables)

    @tf.function
    def step():
        return parts.train(*next(iterator))

    for _ in range(STEPS):
        loss = step()
    return *parts.state(), float(loss)


def train_scheduled(strategy, make_optimizer, kind):
    with strategy.scope():
        parts = Parts(make_optimizer)
    function, steps = kind(strategy, parts.train)
    coordinator = strategy.coordinator
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    for _ in range(STEPS // steps):
        loss = coordinator.schedule(function, args=(iterator,))
    coordinator.join()
    return *parts.state(), float(loss.fetch())


def assert_same(plain, ours):
    for expected, received in zip(plain[0], ours[0], strict=True):
        np.testing.assert_allclose(received, expected, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(ours[1:], plain[1:], rtol=1e-4)


CASES = [
    (name, kind, 1 if name in NOT_ELEMENTWISE else num_shards)
    for name, kind, num_shards in zip(
        OPTIMIZERS, itertools.cycle(KINDS), itertools.cycle([2, 2, 1, 3]), strict=False
    )
]


# Each kind of loop, and of optimizer, and number of shards.
NAMES = ["sgd", "adam", "nadam", "lamb"]


@pytest.mark.parametrize(
    ("name", "kind", "num_shards"),
    with_matrix(CASES, at_length=[case for case in CASES if case[0] not in NAMES]),
)
def test_one_worker_equals_a_plain_loop(strategy, sharded, name, kind, num_shards):
    sharded(num_shards, min_bytes=0)
    plain = train_plainly(OPTIMIZERS[name])
    assert_same(plain, train_scheduled(strategy, OPTIMIZERS[name], kind))


def test_what_a_function_returns_comes_back_as_it_is(strategy):
    @tf.function
    def function(ids):
        def replica_fn(ids):
            ragged = tf.RaggedTensor.from_row_lengths(ids, [1, 2])
            return {"twice": 2 * ids, "number": 3, "pair": (ragged, "text")}

        returned = strategy.run(replica_fn, args=(ids,))
        ragged, text = returned["pair"]
        return {**returned, "pair": (ragged.to_tensor(), text)}

    returned = strategy.coordinator.schedule(function, args=(tf.constant([4, 5, 6]),)).fetch()
    assert returned["twice"].tolist() == [8, 10, 12]
    assert int(returned["number"]) == 3
    ragged, text = returned["pair"]
    assert ragged.tolist() == [[4, 0], [5, 6]]
    assert text in ("text", b"text")
    nothing = tf.function(lambda: strategy.run(lambda: None))
    assert strategy.coordinator.schedule(nothing).fetch() is None


def test_methods_of_the_strategy_are_those_of_one_replica(strategy):
    coordinator = strategy.coordinator

    @tf.function
    def function():
        value = strategy.run(lambda: tf.constant([1.0, 3.0]))
        return (
            strategy.reduce("SUM", value, axis=None),
            strategy.reduce("MEAN", value, axis=0),
            strategy.gather(value, axis=0),
            strategy.experimental_local_results(value),
        )

    total, mean, gathered, (local,) = coordinator.schedule(function).fetch()
    assert total.tolist() == gathered.tolist() == local.tolist() == [1.0, 3.0]
    assert mean == 2.0
    assert strategy.num_replicas_in_sync == 1
    with strategy.scope():
        first = tf.Variable(1.0)
        with strategy.extended.colocate_vars_with(first):
            assert tf.Variable(2.0).device == first.device


# TensorFlow's, of a dataset that a function captures.
@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options")
@pytest.mark.parametrize("kind", ["function", "context", "traced", "dataset", "distributed"])
def test_ways_to_make_a_per_worker_dataset(strategy, kind):
    coordinator = strategy.coordinator

    def of_context(context):
        assert isinstance(context, tf.distribute.InputContext)
        return tf.data.Dataset.range(100).batch(2)

    made = {
        "function": lambda: tf.data.Dataset.range(100).batch(2),
        "context": lambda: strategy.distribute_datasets_from_function(of_context),
        "traced": tf.function(lambda: strategy.distribute_datasets_from_function(of_context)),
        "dataset": tf.data.Dataset.range(100).batch(2),
        "distributed": None,
    }[kind]
    if kind == "distributed":
        made = strategy.experimental_distribute_dataset(tf.data.Dataset.range(100).batch(2))
    per_worker = coordinator.create_per_worker_dataset(made)
    iterator = iter(per_worker)

    @tf.function
    def function(iterator):
        return strategy.run(tf.reduce_sum, args=(next(iterator),))

    sums = [coordinator.schedule(function, args=(iterator,)) for _ in range(3)]
    assert coordinator.fetch(sums) == [1, 5, 9]
    # An iterator that is tuned keeps its worker waiting when it goes, for as long as it has lived.
    assert tuning(strategy, per_worker) == {"enabled": False}


def tuning(strategy, per_worker):
    """Return which options of tf.data's tuning a worker's dataset has been given."""

    @tf.function(autograph=False)
    def options_of(dataset):
        for inside in ("_cloned_datasets", "_datasets"):  # of a distributed one
            if hasattr(dataset, inside):
                dataset = getattr(dataset, inside)[0]
        return tf.raw_ops.GetOptions(input_dataset=tf.data.experimental.to_variant(dataset))

    written = strategy.coordinator.schedule(options_of, args=(per_worker.build(),)).fetch()
    options = Options.FromString(written).autotune_options
    return {field.name: value for field, value in options.ListFields()}


@pytest.mark.parametrize("traced", [False, True])
def test_a_per_worker_dataset_that_asks_to_be_tuned_is(strategy, traced):
    def tuned():
        dataset, options = tf.data.Dataset.range(4), tf.data.Options()
        options.autotune.enabled = True
        return dataset.with_options(options)

    made = tf.function(tuned) if traced else tuned
    assert tuning(strategy, strategy.coordinator.create_per_worker_dataset(made)) == {
        "enabled": True
    }


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options")
def test_what_a_distributed_iterator_reads_on_a_device_is_not_tuned(strategy, monkeypatch):
    owner, name, tuned = _compat.multi_device_iterator_ops, "_create_device_dataset", []
    original = getattr(owner, name)

    def noting(*args):
        made = original(*args)
        tuned.append(made.options().autotune.enabled)
        return made

    monkeypatch.setattr(owner, name, noting)
    distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(1))
    iterator = iter(strategy.coordinator.create_per_worker_dataset(distributed))

    @tf.function
    def function(iterator):
        return next(iterator)

    assert strategy.coordinator.schedule(function, args=(iterator,)).fetch() == 0
    assert tuned == [False]


def test_an_error_of_a_function_reaches_join_once(strategy):
    coordinator = strategy.coordinator

    @tf.function
    def failing(number):
        tf.debugging.assert_less(number, 3, "a number that is too large")
        return number

    coordinator.schedule(failing, args=(tf.constant(7),))
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        coordinator.join()
    coordinator.join()
    assert coordinator.schedule(failing, args=(tf.constant(1),)).fetch() == 1
    iterator = iter(coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(2)))

    @tf.function
    def following(iterator):
        return strategy.run(lambda elements: next(elements), args=(iterator,))

    for _ in range(3):
        coordinator.schedule(following, args=(iterator,))
    with pytest.raises(tf.errors.OutOfRangeError):
        coordinator.join()


def test_an_id_out_of_range_names_its_table(strategy):
    with strategy.scope():
        layer = keras.layers.Embedding(10, 2)
        layer.build(None)

    @tf.function
    def function(ids):
        return strategy.run(layer, args=(ids,))

    strategy.coordinator.schedule(function, args=(tf.constant([10]),))
    with pytest.raises(InputError, match="has 10 rows"):
        strategy.coordinator.join()


@pytest.mark.parametrize("kind", ["iterates", "python", "applied in a loop"])
def test_what_a_step_cannot_do_is_refused_by_name(strategy, kind):
    with strategy.scope():
        variable = keras.Variable(np.zeros(3, "float32"))
        optimizer = keras.optimizers.SGD(1.0)

    def iterates(iterator):
        for batch in iterator:
            variable.assign_add(tf.cast(batch, tf.float32) * tf.ones(3))

    def python(iterator):
        return tf.py_function(lambda value: value, [next(iterator)], tf.int64)

    def applied(iterator):
        for _ in tf.range(3):
            optimizer.apply([tf.ones(3)], [variable])
        return next(iterator)

    body, message = {
        "iterates": (iterates, "loops over an iterator"),
        "python": (python, "calls Python functions"),
        "applied in a loop": (applied, "inside a `tf.while_loop`"),
    }[kind]
    coordinator = strategy.coordinator
    iterator = iter(coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(9)))

    @tf.function
    def function(iterator):
        return strategy.run(body, args=(iterator,))

    with pytest.raises(Exception, match=message) as raised:
        coordinator.schedule(function, args=(iterator,))
    assert isinstance(raised.value, UnsupportedError) or "UnsupportedError" in str(raised.value)


def test_metrics_of_a_loop_are_read_and_reset_at_any_time(strategy):
    metric = keras.metrics.Mean()  # outside the scope
    with strategy.scope():
        loss = keras.metrics.Sum()

    @tf.function
    def function(value):
        def replica_fn(value):
            metric.update_state(value)
            loss.update_state(value)

        strategy.run(replica_fn, args=(value,))

    coordinator = strategy.coordinator
    for epoch in range(3):
        for value in range(10):
            coordinator.schedule(function, args=(tf.constant(float(value + epoch)),))
            assert float(metric.count) <= 10  # while it goes on
        coordinator.join()
        assert float(metric.count) == 10
        assert float(metric.result()) == 4.5 + epoch
        metric.reset_state()
    assert float(loss.result()) == 45 + 55 + 65
    loss.reset_state()
    assert float(loss.result()) == 0


def test_fit_goes_on_where_a_loop_has_ended_and_the_other_way(strategy):
    def make(optimizer="sgd"):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    x, y = X[:16], Y[:16]
    plain = make()
    plain.fit(x, y, batch_size=16, epochs=12, shuffle=False, verbose=0)
    with strategy.scope():
        model = make()

    @tf.function
    def function():
        strategy.run(model.train_step, args=((tf.constant(x), tf.constant(y)),))

    coordinator = strategy.coordinator
    for _ in range(4):
        coordinator.schedule(function)
    model.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0)  # waits for them
    assert int(model.optimizer.iterations.numpy()) == 8
    for _ in range(4):
        coordinator.schedule(function)
    coordinator.join()
    for expected, received in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-6)


def test_a_callback_of_fit_may_schedule(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        total = keras.metrics.Sum()

    @tf.function
    def function():
        strategy.run(lambda: total.update_state(1.0))

    class Schedules(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch in (1, 3):
                strategy.coordinator.schedule(function)
                strategy.coordinator.join()

    model.fit(X, Y, batch_size=32, verbose=0, callbacks=[Schedules()])
    assert float(total.result()) == 2
    assert int(model.optimizer.iterations.numpy()) == 5


def test_bare_variables_are_read_trained_and_assigned(strategy, sharded):
    sharded(2, min_bytes=0)
    with strategy.scope():
        table = tf.Variable(tf.ones([20, 4]), name="table")
        kernel = tf.Variable(tf.ones([5, 3]), name="kernel")
        counter = tf.Variable(0.0)
        optimizers = [keras.optimizers.SGD(0.5), keras.optimizers.Adam(0.5)]
    assert [len(v.variables) for v in (table, kernel)] == [2, 2]
    assert len({shard.device for shard in table.variables}) == 2

    def train(optimizer, takes_apart):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, [1, 11, 15])
            loss = tf.reduce_sum(rows) + tf.reduce_sum(kernel * 2.0)
        trained = [*table.variables, *kernel.variables] if takes_apart else [table, kernel]
        optimizer.apply(tape.gradient(loss, trained), trained)
        counter.assign_add(1.0)

    @tf.function
    def in_run():
        strategy.run(train, args=(optimizers[0], False))

    @tf.function
    def whole():
        train(optimizers[1], True)

    for function in (in_run, whole):
        table.assign(tf.ones([20, 4]))
        kernel.assign(tf.ones([5, 3]))
        for _ in range(4):
            strategy.coordinator.schedule(function)
        strategy.coordinator.join()
        rows = tf.convert_to_tensor(table).numpy()
        # Adam too moves by its rate where all gradients are the same.
        np.testing.assert_allclose(rows[[1, 11, 15]], -1.0, atol=1e-4)
        np.testing.assert_allclose(np.delete(rows, [1, 11, 15], 0), 1.0, atol=1e-4)
        moved = 4.0 if function is in_run else 2.0
        np.testing.assert_allclose(tf.convert_to_tensor(kernel), 1.0 - moved, atol=1e-4)
    assert counter.numpy() == 8
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.convert_to_tensor(kernel) ** 2)
    np.testing.assert_allclose(tape.gradient(loss, kernel), 2 * tf.convert_to_tensor(kernel))


def test_calls_of_a_custom_loop_draw_different_numbers(strategy):
    """TensorFlow's own random operations too, by a count on a ps."""
    keras.utils.set_random_seed(3)
    coordinator = strategy.coordinator

    @tf.function
    def draw():
        drawn = [strategy.run(lambda: tf.random.uniform([], seed=5)) for _ in range(3)]
        return tf.stack(drawn)

    values = [coordinator.schedule(draw) for _ in range(20)]
    coordinator.join()
    assert len({float(number) for value in values for number in value.fetch()}) == 60
