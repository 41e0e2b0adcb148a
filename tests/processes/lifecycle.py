"""Makes objects of every kind, fails to connect in several ways, connects, and looks at the
objects; see test_lifecycle.py.
"""

from __future__ import annotations

import gc
import socket
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import earlier_datasets
import grpc
import keras
import numpy as np
import tensorflow as tf
from scenario import print_report

import kerasps

DIRECTORY = Path(sys.argv[1])
REPORT = {"errors": {}, "wrong": {}}
X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
WORDS = tf.constant(["a", "b", "z"])


def make_model():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


def small_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    model.compile("sgd", "mse")
    return model


def table(keys, values):
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1)


def adapted(layer, data):
    layer.adapt(data)
    return layer


class TrackedVariable(tf.saved_model.experimental.TrackableResource):
    """What tokenizers of other packages are made like: a resource with a name, and a way to fill
    it.
    """

    def __init__(self):
        super().__init__()
        self._initialize()

    def _create_resource(self):
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2], shared_name="tracked")

    def _initialize(self):
        tf.raw_ops.AssignVariableOp(resource=self.resource_handle, value=[3.0, 4.0])

    def __call__(self):
        return tf.raw_ops.ReadVariableOp(resource=self.resource_handle, dtype=tf.float32)


# Made at the level of the module, as notebooks do.
variable = tf.Variable([1.0, 2.0, 3.0])
made = []


@tf.function
def count():
    """Make a variable, as a compiled step makes those of metrics, and count in it."""
    if not made:
        made.append(tf.Variable(0.0))
    return made[0].assign_add(1.0)


count()
(counted,) = made
keras_variable = keras.Variable([1.0, 2.0, 3.0])
large = tf.Variable(tf.range(5_000_000, dtype=tf.float32))
static = table(["a", "b"], [1, 2])
vocabulary = DIRECTORY / "vocabulary.txt"
vocabulary.write_text("a\nb\n")
initializer = tf.lookup.TextFileInitializer(
    str(vocabulary),
    tf.string,
    tf.lookup.TextFileIndex.WHOLE_LINE,
    tf.int64,
    tf.lookup.TextFileIndex.LINE_NUMBER,
)
from_file, from_file_too = (
    tf.lookup.StaticHashTable(initializer, -1),
    tf.lookup.StaticHashTable(initializer, -1),
)
buckets = tf.lookup.StaticVocabularyTable(initializer, 3)
vocabulary.unlink()
anonymous = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer([5], [6]), -1, experimental_is_anonymous=True
)
mutable = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
mutable.insert(["a"], [5])
vectors = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, [0.0, 0.0])
vectors.insert([1], [[2.0, 3.0]])
dense = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, -1, -1, -2)
dense.insert([7], [70])
strings = adapted(keras.layers.StringLookup(), ["a", "b", "b"])
given = keras.layers.StringLookup(vocabulary=["a", "b"])
inverse = keras.layers.StringLookup(vocabulary=["a", "b"], invert=True)
integers = keras.layers.IntegerLookup(vocabulary=[10, 20])
text = adapted(keras.layers.TextVectorization(), ["hello world", "hello"])
normalization = adapted(keras.layers.Normalization(), X)
tracked = TrackedVariable()
generator, twin = tf.random.Generator.from_seed(3), tf.random.Generator.from_seed(3)
seeds, other_seeds = keras.random.SeedGenerator(5), keras.random.SeedGenerator(5)
mapped = tf.data.Dataset.from_tensor_slices(WORDS).map(given)
shuffled = tf.data.Dataset.range(20).shuffle(20, seed=1)
shuffled_order = [[int(i) for i in shuffled] for _ in range(2)]
shuffled = tf.data.Dataset.range(20).shuffle(20, seed=1)
first_order = [int(i) for i in shuffled]
cached = tf.data.Dataset.range(3).map(lambda i: tf.cast(i, tf.float32) * variable[1]).cache()
list(cached)
iterator = iter(tf.data.Dataset.from_tensor_slices(WORDS).map(given))
next(iterator)
model = make_model()
model.fit(X, Y, verbose=0)
predicted, evaluated = model.predict(X, verbose=0), model.evaluate(X, Y, verbose=0)
evaluated_in_part = model.evaluate(X[:10], Y[:10], verbose=0)


def copy_of(original):
    copy = keras.models.clone_model(original)
    copy.set_weights(original.get_weights())
    copy.compile("adam", "mse", metrics=["mae"])
    return copy


other, trained, to_train = copy_of(model), copy_of(model), copy_of(model)
to_train.train_on_batch(X, Y)
to_train.set_weights(model.get_weights())
trained.train_on_batch(X, Y)
trained.set_weights(model.get_weights())
losses = trained.fit(X, Y, epochs=2, verbose=0, shuffle=False).history["loss"]
text_model = keras.Sequential(
    [keras.Input((), dtype="string"), text, keras.layers.Embedding(10, 3)]
)
text_predicted = text_model.predict(tf.constant(["hello", "world"]), verbose=0)
text_model.export(DIRECTORY / "exported", verbose=False)
loaded = tf.saved_model.load(DIRECTORY / "exported")
metric = keras.metrics.Mean()
metric.update_state([1.0, 2.0])
optimizer = keras.optimizers.Adam()
optimizer.apply([tf.ones(3)], [keras_variable])
keras_value = keras_variable.numpy()
saved = tf.train.Checkpoint(variable=variable, table=mutable).save(str(DIRECTORY / "checkpoint"))
writer = tf.summary.create_file_writer(str(DIRECTORY / "events"))
with writer.as_default():
    tf.summary.scalar("a", 1.0, step=0)
queue = tf.queue.FIFOQueue(10, [tf.float32])


@tf.function
def function(x):
    return x * variable, static.lookup(WORDS), given(WORDS)


@tf.function(jit_compile=True)
def compiled(x):
    return x * variable


concrete = function.get_concrete_function(tf.TensorSpec([], tf.float32))
for traced in (function, compiled):
    traced(tf.constant(2.0))
live_bytes = tf.constant(np.arange(3))


def note_error(name, connect):
    try:
        connect()
        REPORT["errors"][name] = None
    except Exception as exc:
        REPORT["errors"][name] = [type(exc).__name__, str(exc)]


def check(name, actual, expected):
    """Notes what is wrong; an object that is lost would raise."""
    try:
        actual, expected = (
            [np.ravel(part) for part in tf.nest.flatten(whole)] for whole in (actual(), expected)
        )
        np.testing.assert_equal(np.concatenate(actual), np.concatenate(expected))
    except Exception as exc:
        REPORT["wrong"][name] = f"{type(exc).__name__}: {exc}"[:400]


def check_all():
    b = tf.constant(["a", "b", "z"])
    check("variable", lambda: variable.assign_add([1.0, 1.0, 1.0]).numpy(), [2.0, 3.0, 4.0])
    variable.assign([1.0, 2.0, 3.0])
    before = counted.numpy()
    counted.assign_add(1.0)
    check(
        "variable that a function made",
        lambda: [counted.numpy(), count()],
        [before + 1, before + 2],
    )
    check("what its function made of it", counted.numpy, before + 2)
    check("keras variable", keras_variable.numpy, keras_value)
    before = optimizer.iterations.numpy()
    optimizer.apply([tf.ones(3)], [keras_variable])
    check("optimizer", optimizer.iterations.numpy, before + 1)
    keras_variable.assign(keras_value)
    check(
        "large", lambda: [large[-1].numpy(), tf.reduce_sum(large[:10]).numpy()], [4_999_999.0, 45.0]
    )
    check("eager tensor", lambda: live_bytes + 1, [1, 2, 3])
    check("static table", lambda: static.lookup(b), [1, 2, -1])
    check(
        "tables of a file",
        lambda: [from_file.lookup(b), from_file_too.lookup(b)],
        [[0, 1, -1], [0, 1, -1]],
    )
    check("vocabulary table", lambda: buckets.lookup(b)[:2], [0, 1])
    check("anonymous table", lambda: anonymous.lookup(tf.constant([5, 7])), [6, -1])
    check("mutable table", lambda: mutable.lookup(b), [5, -1, -1])
    check(
        "table of vectors",
        lambda: vectors.lookup(tf.constant([1, 2], tf.int64)),
        [[2.0, 3.0], [0.0, 0.0]],
    )
    check("dense table", lambda: dense.lookup(tf.constant([7, 8], tf.int64)), [70, -1])
    mutable.insert(["q"], [9])
    check("insert", lambda: [mutable.size(), mutable.lookup(tf.constant(["q"]))], [2, [9]])
    mutable.remove(tf.constant(["q"]))
    check("StringLookup", lambda: [strings(b), given(b)], [[2, 1, 0], [1, 2, 0]])
    check("inverse StringLookup", lambda: inverse(tf.constant([1, 2])), [b"a", b"b"])
    check("IntegerLookup", lambda: integers(tf.constant([20, 3])), [2, 0])
    check("TextVectorization", lambda: text(tf.constant(["hello world"])), [[2, 3]])
    check("Normalization", lambda: np.round(np.mean(normalization(X)), 4), 0.0)
    check("tracked resource", tracked, [3.0, 4.0])
    check("generator", lambda: generator.normal([3]), twin.normal([3]))
    check(
        "seed generator",
        lambda: keras.random.normal([3], seed=seeds),
        keras.random.normal([3], seed=other_seeds),
    )
    check("mapped dataset", lambda: list(mapped), [1, 2, 0])
    check(
        "newly mapped dataset",
        lambda: list(tf.data.Dataset.from_tensor_slices(b).map(strings).batch(3)),
        [[2, 1, 0]],
    )
    earlier_datasets.check_datasets(check)
    check("cached dataset", lambda: list(cached), [0.0, 2.0, 4.0])
    check("function", lambda: function(tf.constant(2.0)), ([2.0, 4.0, 6.0], [1, 2, -1], [1, 2, 0]))
    check(
        "concrete function",
        lambda: concrete(tf.constant(3.0)),
        ([3.0, 6.0, 9.0], [1, 2, -1], [1, 2, 0]),
    )
    check(
        "new trace of a function",
        lambda: function(tf.constant([2.0])),
        ([2.0, 4.0, 6.0], [1, 2, -1], [1, 2, 0]),
    )
    check("compiled function", lambda: compiled(tf.constant(2.0)), [2.0, 4.0, 6.0])
    check("predict", lambda: model.predict(X, verbose=0), predicted)
    check("evaluate", lambda: model.evaluate(X, Y, verbose=0), evaluated)
    check(
        "evaluate in part",
        lambda: model.evaluate(X[:10], Y[:10], verbose=0),
        evaluated_in_part,
    )
    check(
        "text model",
        lambda: text_model.predict(tf.constant(["hello", "world"]), verbose=0),
        text_predicted,
    )
    check("loaded", lambda: loaded.serve(tf.constant(["hello", "world"])), text_predicted)
    check("metric", metric.result, 1.5)
    check("weights", model.get_weights, other.get_weights())
    check(
        "reset metric",
        lambda: metric.reset_state() or metric.update_state([3.0]) or metric.result(),
        3.0,
    )
    metric.reset_state()
    metric.update_state([1.0, 2.0])


def check_once():
    earlier_datasets.check_iterators(check)
    check("iterator", lambda: list(iterator), [2, 0])
    check("next order of a shuffle", lambda: [int(i) for i in shuffled], shuffled_order[1])
    assert first_order == shuffled_order[0]
    tf.train.Checkpoint(variable=variable, table=mutable).restore(saved).assert_consumed()
    check(
        "checkpoint",
        lambda: [variable.numpy(), mutable.lookup(tf.constant(["a"]))],
        [[1.0, 2.0, 3.0], [5]],
    )
    check(
        "fit",
        lambda: to_train.fit(X, Y, epochs=2, verbose=0, shuffle=False).history["loss"],
        losses,
    )
    check("weights after fit", to_train.get_weights, trained.get_weights())
    check("optimizer after fit", lambda: to_train.optimizer.variables, trained.optimizer.variables)
    to_train.save(DIRECTORY / "m.keras")
    check(
        "saved model",
        keras.models.load_model(DIRECTORY / "m.keras").get_weights,
        trained.get_weights(),
    )


def closed_address():
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder, f"127.0.0.1:{holder.getsockname()[1]}"


def resolver(chief, worker, ps):
    spec = tf.train.ClusterSpec({"chief": [chief], "worker": [worker], "ps": [ps]})
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type="chief", task_id=0, rpc_layer="grpc"
    )


def fail_to_connect():
    """Each way in turn; the process can try again after it, and its objects are alive."""
    global queue
    make = kerasps.ParameterServerStrategy
    chief, chief_address = closed_address()
    gone, gone_address = closed_address()
    foreign = grpc.server(ThreadPoolExecutor(1))  # answers, but is no server of TensorFlow's
    foreign_address = f"127.0.0.1:{foreign.add_insecure_port('127.0.0.1:0')}"
    foreign_ps_address = f"127.0.0.1:{foreign.add_insecure_port('127.0.0.1:0')}"
    foreign.start()
    with chief, gone:
        wrong = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": ["h:1"]})
        )
        note_error("config", lambda: make(wrong))
        note_error(
            "unreachable",
            lambda: make(
                resolver(chief_address, foreign_address, gone_address), connect_timeout=0.3
            ),
        )
        chief.listen()
        note_error(
            "port", lambda: make(resolver(chief_address, foreign_address, foreign_ps_address))
        )
        free, free_address = closed_address()
        with free:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                note_error(
                    "foreign",
                    lambda: make(resolver(free_address, foreign_address, foreign_ps_address)),
                )
            queue = None
            REPORT["warnings"] = [
                str(warning.message) for warning in caught if warning.category is RuntimeWarning
            ]
            note_error(
                "foreign again",
                lambda: make(resolver(free_address, foreign_address, foreign_ps_address)),
            )
    foreign.stop(None).wait()
    check_all()


def main():
    # As a program does that is about to fork; the collector lists nothing of what there is then.
    gc.freeze()
    fail_to_connect()
    strategy = kerasps.ParameterServerStrategy(
        kerasps.LocalCluster(1, 1).cluster_resolver, kerasps.MinSizePartitioner(1 << 12)
    )
    gc.collect()
    check_all()
    check_once()

    same = strategy._cluster_resolver
    make = kerasps.ParameterServerStrategy
    partitioner = kerasps.MinSizePartitioner(1 << 12)
    described_again = resolver(
        *(strategy.description.jobs[job][0] for job in ("chief", "worker", "ps"))
    )
    REPORT["same"] = [
        make(same, partitioner) is strategy,
        make(same, variable_partitioner=partitioner, shard_layout="mod", connect_timeout=1)
        is strategy,
        make(described_again, partitioner) is strategy,
    ]
    note_error("no partitioner", lambda: make(same))
    note_error("other partitioner", lambda: make(same, kerasps.MinSizePartitioner(1 << 13)))
    note_error("other layout", lambda: make(same, partitioner, shard_layout="div"))
    note_error("other updates", lambda: make(same, partitioner, sparse_updates="dense"))
    note_error("other cluster", lambda: make(resolver("127.0.0.1:2", "127.0.0.1:3", "127.0.0.1:4")))
    again = kerasps.LocalCluster(1, 1).cluster_resolver
    REPORT["same"].append(make(again, partitioner) is strategy)
    REPORT["repr"] = repr(strategy)

    ours = copy_of(other)  # as was made before, and then trained on the cluster
    with strategy.scope():
        other.compile("adam", "mse")
        ours.compile("adam", "mse")
    fitted = [m.fit(X, Y, verbose=0, shuffle=False).history["loss"][0] for m in (ours, other)]
    check(
        "fit of models from before and after",
        lambda: np.round(fitted[1], 5),
        np.round(fitted[0], 5),
    )
    check(
        "their weights",
        lambda: np.round(np.concatenate([np.ravel(w) for w in other.get_weights()]), 5),
        np.round(np.concatenate([np.ravel(w) for w in ours.get_weights()]), 5),
    )
    other.set_weights(model.get_weights())
    with strategy.scope():
        looked_up = keras.Sequential(
            [keras.Input((), dtype="string"), strings, keras.layers.Embedding(10, 1)]
        )
        looked_up.compile(keras.optimizers.SGD(), "mse")
    words = np.array(["a", "b", "z", "a"] * 8)
    looked_up.fit(words, np.ones((32, 1)), batch_size=4, verbose=0)
    check("steps with a lookup layer from before", looked_up.optimizer.iterations.numpy, 8)
    check("rows by a lookup layer from before", lambda: looked_up.predict(words[:4], verbose=0),
          looked_up.layers[1].embeddings.numpy()[[2, 1, 0, 2]])  # fmt: skip
    with strategy.scope(), warnings.catch_warnings():
        # Of what is read in this process, since its order or its tables are here.
        warnings.filterwarnings("ignore", "The dataset (uses|draws)", UserWarning)
        earlier_datasets.check_steps(check, small_model)
    REPORT["ps_bytes"] = strategy.placement().num_bytes
    check_all()
    earlier_datasets.directory.cleanup()
    print_report(REPORT)


main()
