"""Rows of an initial value are those of the whole value, bit for bit, and are made without it."""

from __future__ import annotations

import inspect
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasps.variables.keras import initialization
from kerasps.variables.keras.initialization import RowInitializer

# Rows of seven values: three of four start within a group of four, and every second one within a
# group of two.
SHAPE = (53, 7)

# The seeds are as large as those that Keras makes itself.
SEED = 987_654_321

RANDOM = {
    "RandomNormal": lambda seed: keras.initializers.RandomNormal(0.3, 1.7, seed),
    "TruncatedNormal": lambda seed: keras.initializers.TruncatedNormal(-0.1, 0.7, seed),
    "RandomUniform": lambda seed: keras.initializers.RandomUniform(-0.3, 0.9, seed),
    "GlorotUniform": lambda seed: keras.initializers.GlorotUniform(seed),
    "GlorotNormal": lambda seed: keras.initializers.GlorotNormal(seed),
    "HeUniform": lambda seed: keras.initializers.HeUniform(seed),
    "HeNormal": lambda seed: keras.initializers.HeNormal(seed),
    "LecunUniform": lambda seed: keras.initializers.LecunUniform(seed),
    "LecunNormal": lambda seed: keras.initializers.LecunNormal(seed),
    "VarianceScaling of fan_out": lambda seed: keras.initializers.VarianceScaling(
        2.5, "fan_out", "untruncated_normal", seed
    ),
}
if "input_axes" in inspect.signature(keras.initializers.VarianceScaling).parameters:
    RANDOM["VarianceScaling of axes"] = lambda seed: keras.initializers.VarianceScaling(
        0.7, "fan_in", "uniform", seed, input_axes=[0], output_axes=[1]
    )
CONSTANT = {
    "Zeros": keras.initializers.Zeros(),
    "Ones": keras.initializers.Ones(),
    "Constant": keras.initializers.Constant(0.1),
    "Constant of an array": keras.initializers.Constant(np.arange(53 * 7).reshape(SHAPE) / 10),
    "Constant of lists": keras.initializers.Constant([[row / 10] for row in range(53)]),
    "Constant of a row": keras.initializers.Constant(np.arange(7) / 10),
    "Constant of one row": keras.initializers.Constant(np.arange(7).reshape(1, 7) / 10),
}
LAYOUTS = {
    "two blocks": [range(0, 27), range(27, 53)],
    "three blocks": [range(0, 18), range(18, 37), range(37, 53)],
    "a row each": [range(row, row + 1) for row in range(53)],
    "every second": [range(0, 53, 2), range(1, 53, 2)],
    "every third": [range(0, 53, 3), range(1, 53, 3), range(2, 53, 3)],
    "a block without rows": [range(0, 53), range(53, 53)],
    "all": [range(53)],
}


def pairwise(names, dtypes):
    """Each name with each layout and with each dtype and, of four names on, each layout with each
    dtype.
    """
    return [
        (name, layout, dtypes[(row + column) % len(dtypes)])
        for row, name in enumerate(names)
        for column, layout in enumerate(LAYOUTS)
    ]


def bits(value):
    """The bytes of each row, so that -0.0 is not 0.0."""
    value = np.ascontiguousarray(np.asarray(value))
    return value.view(f"u{value.itemsize}")


def assert_rows_are_those_of_the_whole(initializer, whole, shards, shape=SHAPE, dtype="float32"):
    make_rows = RowInitializer(initializer, shape, dtype)
    for rows in shards:
        values = make_rows(rows)
        assert values.dtype == dtype
        assert values.shape == (len(rows), *shape[1:])
        np.testing.assert_array_equal(bits(values), bits(whole)[rows.start : rows.stop : rows.step])
    return make_rows


@pytest.fixture
def small_chunks(monkeypatch):
    """Several chunks for a shard of a test's size: three rows of float32."""
    monkeypatch.setattr(initialization, "CHUNK_BYTES", 3 * 7 * 4)


@pytest.mark.parametrize(
    ("name", "layout", "dtype"), pairwise(RANDOM, ["float16", "bfloat16", "float32", "float64"])
)
def test_random_rows_are_those_of_the_whole(name, layout, dtype):
    initializer = RANDOM[name](SEED)
    make_rows = assert_rows_are_those_of_the_whole(
        initializer, initializer(SHAPE, dtype=dtype), LAYOUTS[layout], dtype=dtype
    )
    assert make_rows.is_exact_by_rows


@pytest.mark.parametrize(
    ("name", "layout", "dtype"),
    pairwise(
        ["RandomNormal", "TruncatedNormal", "RandomUniform"],
        ["float16", "bfloat16", "float32", "float64"],
    ),
)
@pytest.mark.usefixtures("small_chunks")
def test_rows_that_are_made_in_several_chunks_are_those_of_the_whole(name, layout, dtype):
    initializer = RANDOM[name](SEED)
    assert_rows_are_those_of_the_whole(
        initializer, initializer(SHAPE, dtype=dtype), LAYOUTS[layout], dtype=dtype
    )


@pytest.mark.parametrize(
    ("name", "layout", "dtype"), pairwise(CONSTANT, ["float16", "float32", "float64", "int32"])
)
def test_constant_rows_are_those_of_the_whole(name, layout, dtype):
    initializer = CONSTANT[name]
    make_rows = assert_rows_are_those_of_the_whole(
        initializer, initializer(SHAPE, dtype=dtype), LAYOUTS[layout], dtype=dtype
    )
    assert make_rows.is_exact_by_rows


@pytest.mark.parametrize("shape", [(53,), (53, 3, 5), (53, 2, 3, 5), (53, 0), (53, 1)])
@pytest.mark.parametrize("name", ["GlorotUniform", "HeNormal", "Constant", "Ones"])
def test_a_variable_may_have_any_number_of_axes(name, shape):
    initializer = (RANDOM.get(name) or (lambda seed: CONSTANT[name]))(SEED)
    shards = LAYOUTS["two blocks"] + LAYOUTS["every third"]
    assert_rows_are_those_of_the_whole(
        initializer, initializer(shape, dtype="float32"), shards, shape
    )


def test_a_shard_of_many_chunks_at_the_size_that_is_used():
    shape = (300_001, 33)
    initializer = keras.initializers.TruncatedNormal(seed=SEED)
    shards = [range(150_001, 300_001), range(1, 300_001, 2)]
    assert all(33 * 4 * len(rows) > 2 * initialization.CHUNK_BYTES for rows in shards)
    assert_rows_are_those_of_the_whole(
        initializer, initializer(shape, dtype="float32"), shards, shape
    )


def test_rows_far_beyond_32_bits_of_elements_are_made_in_no_time():
    shape = (10**10, 7)
    make_rows = RowInitializer(
        keras.initializers.RandomUniform(0.0, 1.0, seed=SEED), shape, "float32"
    )
    first, last = make_rows(range(2)), make_rows(range(10**10 - 3, 10**10, 2))
    np.testing.assert_array_equal(bits(last[1:]), bits(make_rows(range(10**10 - 1, 10**10))))
    assert not np.intersect1d(first, last).size
    assert 0.0 <= np.min(last) < np.max(last) < 1.0


def test_an_initializer_that_made_its_own_seed_is_called_again_with_it():
    initializer = keras.initializers.GlorotUniform()
    assert isinstance(initializer.seed, int)
    assert_rows_are_those_of_the_whole(
        initializer, initializer(SHAPE, dtype="float32"), LAYOUTS["every third"]
    )


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**32 - 1])
def test_seeds_at_the_ends_of_their_range(seed):
    def whole_or_error():
        try:
            return keras.initializers.RandomNormal(seed=seed)(SHAPE, dtype="float32")
        except Exception as error:
            return error

    whole = whole_or_error()
    if isinstance(whole, Exception):
        with pytest.raises(type(whole)):
            RowInitializer(keras.initializers.RandomNormal(seed=seed), SHAPE, "float32")
    else:
        assert_rows_are_those_of_the_whole(
            keras.initializers.RandomNormal(seed=seed), whole, LAYOUTS["two blocks"]
        )


@pytest.mark.parametrize(
    "name", ["RandomNormal", "TruncatedNormal", "RandomUniform", "GlorotUniform", "Orthogonal"]
)
def test_all_shards_are_one_draw_of_a_seed_generator(name):
    make = {**RANDOM, "Orthogonal": lambda seed: keras.initializers.Orthogonal(seed=seed)}[name]
    plain, ours = make(keras.random.SeedGenerator(5)), make(keras.random.SeedGenerator(5))
    first, second = plain(SHAPE, dtype="float32"), plain(SHAPE, dtype="float32")
    assert not np.array_equal(first, second)
    for whole in (first, second):
        assert_rows_are_those_of_the_whole(
            ours, whole, LAYOUTS["every third"] + LAYOUTS["two blocks"]
        )
    np.testing.assert_array_equal(ours.seed.state, plain.seed.state)
    assert type(ours.seed) is keras.random.SeedGenerator


def test_rows_are_made_within_init_scope_of_a_graph():
    initializer = keras.initializers.HeNormal(seed=keras.random.SeedGenerator(5))
    whole = keras.initializers.HeNormal(seed=keras.random.SeedGenerator(5))(SHAPE, dtype="float32")
    made = []

    @tf.function
    def build():
        make_rows = RowInitializer(initializer, SHAPE, "float32")
        with tf.init_scope(), tf.device("CPU:0"):
            made.extend(make_rows(rows) for rows in LAYOUTS["every second"])

    build()
    for values, rows in zip(made, LAYOUTS["every second"], strict=True):
        np.testing.assert_array_equal(values, whole[rows.start : rows.stop : rows.step])


class Doubled(keras.initializers.RandomNormal):
    """A built-in initializer with a call of its own."""

    def __call__(self, shape, dtype=None):
        return 2 * super().__call__(shape, dtype)


class Renamed(keras.initializers.RandomNormal):
    """A built-in initializer with arguments of its own."""

    def __init__(self):
        super().__init__(mean=1.0, seed=SEED)


def by_hand(shape, dtype=None):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


OTHERS = {
    "override": lambda: Doubled(seed=SEED),
    "override of a generator": lambda: Doubled(seed=keras.random.SeedGenerator(5)),
    "Orthogonal": lambda: keras.initializers.Orthogonal(seed=SEED),
    "Identity": keras.initializers.Identity,
    "RandomNormal of means": lambda: keras.initializers.RandomNormal(
        mean=np.arange(7.0, dtype="float32"), seed=SEED
    ),
    "array": lambda: keras.initializers.get(np.arange(53 * 7.0).reshape(SHAPE)),
    "function": lambda: by_hand,
}


# What is sliced is the same for all of them, so one meets every layout.
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("function", layout) for layout in LAYOUTS),
        *((name, "every third") for name in OTHERS if name != "function"),
    ],
)
def test_any_other_initializer_makes_the_whole_value_and_is_sliced(name, layout):
    whole = OTHERS[name]()(SHAPE, dtype="float32")
    make_rows = assert_rows_are_those_of_the_whole(OTHERS[name](), whole, LAYOUTS[layout])
    assert not make_rows.is_exact_by_rows


def test_a_subclass_without_a_call_of_its_own_makes_rows():
    initializer = Renamed()
    whole = initializer(SHAPE, dtype="float32")
    assert assert_rows_are_those_of_the_whole(
        initializer, whole, LAYOUTS["every second"]
    ).is_exact_by_rows


@pytest.mark.parametrize("rows", [range(0, 32), range(32, 64), range(0, 64, 2)])
def test_rows_of_a_whole_value_do_not_keep_it_in_memory(rows):
    whole = tf.ones([64, 16])
    made = RowInitializer(lambda shape, dtype=None: whole, (64, 16), "float32")(rows)
    # A view of a tensor shares its memory, where `numpy()` copies.
    assert not np.shares_memory(np.asarray(memoryview(made)), np.asarray(memoryview(whole)))
    assert np.shares_memory(np.asarray(memoryview(whole[:32])), np.asarray(memoryview(whole))), (
        "a slice is a view"
    )


def test_a_large_value_that_must_be_made_whole_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(initialization, "LARGE_VALUE_BYTES", 53 * 7 * 4 - 1)
    expected = (
        r"makes the whole initial value of 1,484 bytes.*Received: by_hand for shape \(53, 7\) "
        r"and dtype float32\. Use `keras\.initializers\.VarianceScaling`"
    )
    with pytest.warns(UserWarning, match=expected) as caught:
        make_rows = RowInitializer(by_hand, SHAPE, "float32")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in LAYOUTS["two blocks"]:
            make_rows(rows)
        RowInitializer(by_hand, SHAPE, "float16")
        RowInitializer(keras.initializers.GlorotUniform(), SHAPE, "float64")


@pytest.mark.parametrize("rows", [range(-1, 3), range(50, 54), range(0, 60, 2), range(5, 0, -1)])
def test_rows_that_the_variable_has_not_are_an_error(rows):
    make_rows = RowInitializer(keras.initializers.Zeros(), SHAPE, "float32")
    with pytest.raises(
        ValueError, match=r"Expected: a range within range\(53\).*Received: rows=range"
    ):
        make_rows(rows)


@pytest.mark.parametrize(
    ("initializer", "received"),
    [
        (lambda shape, dtype=None: tf.zeros([3, 7], dtype), r"\(3, 7\)"),
        (keras.initializers.Constant(np.zeros((2, *SHAPE))), r"\(2, 53, 7\)"),
    ],
)
def test_a_value_of_another_shape_is_an_error(initializer, received):
    with pytest.raises(ValueError, match=rf"Expected: \(53, 7\)\. Received: {received}"):
        RowInitializer(initializer, SHAPE, "float32")(range(3))


@pytest.mark.parametrize(
    "initializer",
    [keras.initializers.RandomNormal(seed=1), keras.initializers.Constant(np.zeros(3))],
)
def test_what_keras_cannot_make_is_the_same_error(initializer):
    dtype = "int32" if isinstance(initializer, keras.initializers.RandomNormal) else "float32"
    with pytest.raises(Exception, match=r".") as plain:
        initializer(SHAPE, dtype=dtype)
    with pytest.raises(plain.type):
        RowInitializer(initializer, SHAPE, dtype)(range(3))
