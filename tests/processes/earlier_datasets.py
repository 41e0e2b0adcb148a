"""Datasets of every kind of thing that a function may use, made when this is imported; see
lifecycle.py, which connects meanwhile.
"""

from __future__ import annotations

import tempfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers

EXAMPLES = np.arange(32, dtype="float32").reshape(8, 4)
WORDS = tf.constant(["a", "b", "z", "a"] * 2)


def examples():
    return tf.data.Dataset.from_tensor_slices(EXAMPLES)


def words(look_up):
    def four(word):
        return tf.cast(tf.fill((4,), tf.reshape(look_up(word), [-1])[0]), tf.float32)

    return tf.data.Dataset.from_tensor_slices(WORDS).map(four)


def built(layer):
    layer.build((None, 4))
    return layer


def adapted(layer, data):
    layer.adapt(data)
    return layer


def of_python(function):
    def call(x):
        return tf.ensure_shape(function(lambda a: a * 2, [x], tf.float32), (4,))

    return call


variable = tf.Variable([1.0, 2.0, 3.0, 4.0])
keras_variable = keras.Variable([1.0, 2.0, 3.0, 4.0])
counter = tf.Variable(0.0)
held = {"variable": tf.Variable([2.0] * 4)}

tensor = tf.constant([1.0, 2.0, 3.0, 4.0])
options = tf.data.Options()
options.threading.private_threadpool_size = 2
normalization = adapted(layers.Normalization(), EXAMPLES)
model = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.BatchNormalization()])
static = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2]), -1)
anonymous = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(["a", "b"], [1, 2]), -1, experimental_is_anonymous=True
)
mutable = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
mutable.insert(["a"], [5])
strings, text = layers.StringLookup(vocabulary=["a", "b"]), layers.TextVectorization()
text.adapt(["a b", "b"])
directory = tempfile.TemporaryDirectory()
times_variable = examples().map(lambda x: x * variable)

# Whose elements are the same each time.
FIXED = {
    "variable": times_variable,
    "keras.Variable": examples().map(lambda x: x * keras_variable.value, num_parallel_calls=2),
    "deleted variable": examples().map(lambda x: x * held["variable"]),
    "tensor": examples().map(lambda x: x * tensor),
    "variable as data": tf.data.Dataset.from_tensor_slices(keras.Variable(EXAMPLES)),
    "Normalization": examples().map(lambda x: normalization(x[None])[0]),
    "model": examples().map(lambda x: model(x[None])[0]),
    "StaticHashTable": words(static.lookup),
    "anonymous table": words(anonymous.lookup),
    "MutableHashTable": words(mutable.lookup),
    "table and variable": words(lambda w: mutable.lookup(w) * tf.cast(variable[1], tf.int64)),
    "StringLookup": words(strings),
    "TextVectorization": words(text),
    "py_function": examples().map(of_python(tf.py_function)),
    "numpy_function": examples().map(of_python(tf.numpy_function)),
    "from_generator": tf.data.Dataset.from_generator(
        lambda: iter(EXAMPLES), output_signature=tf.TensorSpec((4,))
    ),
    "tf.function": examples().map(tf.function(lambda x: x * variable)),
    "cache": times_variable.cache(),
    "cache in a file": times_variable.cache(f"{directory.name}/cache"),
    "snapshot": times_variable.snapshot(f"{directory.name}/snapshot"),
    "options": times_variable.with_options(options).prefetch(2),
    "shuffled alike": times_variable.shuffle(8, seed=1, reshuffle_each_iteration=False),
    "flat_map": tf.data.Dataset.range(2).flat_map(lambda i: times_variable),
    "flat_map, made within": tf.data.Dataset.range(2).flat_map(
        lambda i: examples().map(lambda x: x * variable)
    ),
    "interleave": tf.data.Dataset.range(2).interleave(lambda i: times_variable, cycle_length=2),
    "zip": tf.data.Dataset.zip(times_variable, examples()).map(lambda a, b: a + b),
    "choose_from_datasets": tf.data.Dataset.choose_from_datasets(
        [times_variable, examples()], tf.data.Dataset.range(2).repeat(4)
    ),
    "concatenate": times_variable.concatenate(examples()),
    "filter": examples().filter(lambda x: x[0] < variable[3] * 4),
    "take_while": examples().take_while(lambda x: x[0] < variable[0] * 20),
    "scan": examples().scan(tf.zeros(4), lambda s, x: (s + x, s + x * variable)),
    "group_by_window": examples()
    .group_by_window(
        lambda x: tf.cast(x[0], tf.int64) % 2,
        lambda key, group: group.map(lambda x: x * variable).batch(2),
        window_size=2,
    )
    .unbatch(),
    "window": times_variable.window(2).flat_map(lambda window: window.batch(2)).unbatch(),
}

held.clear()

noise = built(layers.GaussianNoise(1.0, seed=1))
seeds = keras.random.SeedGenerator(3)
generator = tf.random.Generator.from_seed(3)
noisy = examples().map(lambda x: noise(x, training=True))

# Whose elements are others each time.
RANDOM = {
    "GaussianNoise": noisy,
    "GaussianNoise, in a batch": noisy.batch(4).unbatch(),
    "GaussianNoise, in flat_map": tf.data.Dataset.range(2).flat_map(lambda i: noisy),
    "GaussianNoise, in another structure": noisy.rejection_resample(
        lambda x: 0, [1.0], [1.0], seed=1
    ).map(lambda label, x: x),
    "SeedGenerator": examples().map(lambda x: x + keras.random.normal((4,), seed=seeds)),
    "tf.random.Generator": examples().map(lambda x: x + generator.normal((4,))),
}
counting = examples().map(lambda x: x + counter.assign_add(1.0))


def elements(dataset):
    return [np.array(element) for element in dataset]


BEFORE = {name: elements(dataset) for name, dataset in FIXED.items()}
ITERATORS = {name: iter(dataset) for name, dataset in {**FIXED, **RANDOM}.items()}
for started in ITERATORS.values():
    next(started)


def check_datasets(check):
    """Check that all yield what they should, as often as this is called.

    Args:
        check: notes what is wrong, given a name, a function that returns a value, and what is due.
    """
    for name, dataset in FIXED.items():
        check(f"dataset: {name}", lambda dataset=dataset: elements(dataset), BEFORE[name])
    for name, dataset in RANDOM.items():
        check(
            f"random dataset: {name}",
            lambda dataset=dataset: num_different(dataset),
            len(list(dataset)),
        )
    variable.assign([2.0, 4.0, 6.0, 8.0])
    check(
        "dataset: variable of now",
        lambda: elements(times_variable),
        [2 * element for element in BEFORE["variable"]],
    )
    variable.assign([1.0, 2.0, 3.0, 4.0])
    before = float(counter)
    check(
        "dataset: counter",
        lambda: elements(counting),
        [x + before + number for number, x in enumerate(EXAMPLES, 1)],
    )
    check("what a dataset counted", counter.numpy, before + 8)


def num_different(dataset):
    """Count the noises that the elements have on top of the examples."""
    noises = [element - EXAMPLES[number % 8] for number, element in enumerate(dataset)]
    return len({tuple(np.round(extra, 3)) for extra in noises})


def check_iterators(check):
    """Check that iterators go on where they were. Call once."""
    for name, iterator in ITERATORS.items():
        if name in BEFORE:
            check(f"iterator: {name}", lambda it=iterator: elements(it), BEFORE[name][1:])
        else:
            expected = len(list({**FIXED, **RANDOM}[name])) - 1
            check(f"iterator: {name}", lambda it=iterator: len(elements(it)), expected)


def check_steps(check, make_model):
    """Check that a model of the strategy takes all examples of datasets that draw or look up.

    Args:
        check: as for `check_datasets`.
        make_model: returns a compiled model of the strategy, of four features and one output.
    """
    for name, dataset in [*RANDOM.items(), ("anonymous table", FIXED["anonymous table"])]:
        labelled = dataset.map(lambda x: (x, x[:1])).batch(4)
        trained = make_model()

        def fit(trained=trained, labelled=labelled):
            trained.fit(labelled, verbose=0)
            return trained.optimizer.iterations.numpy()

        check(f"steps: {name}", fit, len(list(labelled)))
