"""Random operations in the graph of a step: their numbers follow from the step's count."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from kerasps.step.draws import random_operations, stateless_draws
from kerasps.step.draws.seeded_draws import repeats_draws, with_draws_of_step

TRUE = tf.constant([[1, 2]], tf.int64)
NUM_DRAWS = 600
UNIGRAMS = [float(k) for k in range(1, 11)]
COUNT = tf.TensorSpec([2], tf.int64)


def concrete(body, compiled=False):
    function = tf.function(body, autograph=False, jit_compile=compiled)
    return function.get_concrete_function(COUNT)


def of_steps(body, compiled=False):
    """Return a function of the number of a step, which draws as `body` does."""
    function = concrete(lambda count: body(), compiled)
    assert repeats_draws(function.graph.as_graph_def(), compiled=compiled)
    drawing = with_draws_of_step(
        function,
        [function.inputs[0].op.name],
        lambda place: 0,
        functools.partial(concrete, compiled=compiled),
        compiled=compiled,
    )
    assert not repeats_draws(drawing.graph.as_graph_def(), compiled=compiled)
    return lambda step: drawing(tf.constant([0, step], tf.int64))


def sampler(of_kind, *, unique, part=None, **arguments):
    def body():
        outputs = of_kind(TRUE, 2, 5, unique=unique, seed=3, **arguments)
        return outputs if part is None else outputs[part]

    return body


log_uniform = functools.partial(sampler, tf.random.log_uniform_candidate_sampler, range_max=10)
uniform = functools.partial(sampler, tf.random.uniform_candidate_sampler, range_max=10)
unigram = functools.partial(
    sampler, tf.random.fixed_unigram_candidate_sampler, range_max=10, unigrams=UNIGRAMS
)


def truncated(shape=(3,), means=0.0):
    return tf.raw_ops.ParameterizedTruncatedNormal(
        shape=shape, means=means, stdevs=2.0, minvals=-1.0, maxvals=3.0, seed=3
    )


def box(**old):
    if old:
        return tf.raw_ops.SampleDistortedBoundingBox(
            image_size=[100, 100, 3], bounding_boxes=tf.ones([1, 1, 4]) * [0, 0, 1, 1], seed=3
        ).size[:2]
    return tf.image.sample_distorted_bounding_box(
        [100, 100, 3], tf.ones([1, 1, 4]) * [0, 0, 1, 1], seed=3, min_object_covered=0.1
    ).size[:2]


BOTH = {
    "categorical": lambda: tf.random.categorical(tf.math.log([[0.1, 0.2, 0.7]]), 3, seed=3),
    "dropout": lambda: tf.nn.dropout(tf.ones([8]), 0.3, seed=3),
    "integers": lambda: tf.random.uniform([3], -5, 100, tf.int32, seed=3),
    "normal": lambda: tf.random.normal([3], 1.0, 2.0, seed=3),
    "parameterized": truncated,
    "parameters by row": lambda: truncated((2, 3), [0.0, 1.0]),
    "shuffle": lambda: tf.random.shuffle(tf.range(6), seed=3),
    "truncated normal": lambda: tf.random.truncated_normal([3], seed=3),
    "uniform": lambda: tf.random.uniform([3], 2.0, 5.0, seed=3),
}
BODIES = {
    **BOTH,
    "box": box,
    "box of before": lambda: box(version=1),
    "gamma": lambda: tf.random.gamma([2], [1.0, 3.0], seed=3),
    "log uniform": log_uniform(unique=True, part=0),
    "log uniform, count": log_uniform(unique=True, part=1),
    "log uniform, repeated": log_uniform(unique=False, part=0),
    "log uniform, repeated, counts": log_uniform(unique=False, part=2),
    "poisson": lambda: tf.random.poisson([2], [1.0, 30.0], seed=3),
    "unigram": unigram(unique=True, part=0),
    "unigram, count": unigram(unique=True, part=1),
    "uniform classes": uniform(unique=True, part=0),
    "uniform classes, count": uniform(unique=True, part=1),
}


@pytest.mark.parametrize(
    ("name", "compiled"), [*((n, False) for n in BODIES), *((n, True) for n in BOTH)]
)
def test_draws_have_the_distribution_of_the_operation(name, compiled):
    """Over many steps, every place has the mean and the deviation that TensorFlow's has."""
    body = BODIES[name]
    step = of_steps(body, compiled)
    plain = tf.function(body, autograph=False)
    ours = np.array([step(number) for number in range(NUM_DRAWS)], np.float64)
    theirs = np.array([plain() for _ in range(NUM_DRAWS)], np.float64)
    assert ours.shape == theirs.shape
    error = np.maximum(theirs.std(0), ours.std(0)) * np.sqrt(2 / NUM_DRAWS)
    assert np.all(np.abs(ours.mean(0) - theirs.mean(0)) <= 5 * error + 1e-6)
    if "counts" not in name:
        np.testing.assert_allclose(ours.std(0), theirs.std(0), rtol=0.25, atol=1e-6)
    num_theirs = len({draw.tobytes() for draw in theirs})
    assert len({draw.tobytes() for draw in ours}) >= 0.7 * num_theirs
    np.testing.assert_array_equal(step(7), ours[7])


def all_draws(step, num_steps=50):
    return np.concatenate([np.ravel(step(number)) for number in range(num_steps)])


def in_loop():
    return tf.map_fn(
        lambda _: tf.random.uniform([], seed=3), tf.range(4), fn_output_signature=tf.float32
    )


def in_nested_loops():
    return tf.map_fn(lambda _: in_loop(), tf.range(3), fn_output_signature=tf.float32)


def in_calls_in_loop():
    call = tf.function(lambda: tf.random.uniform([], seed=3), autograph=False)
    call = call.get_concrete_function()
    return tf.map_fn(lambda _: call() + 0.0, tf.range(3), fn_output_signature=tf.float32)


def in_loop_and_condition():
    def draw(number):
        return tf.cond(
            number > 1,
            lambda: tf.random.uniform([], seed=3),
            lambda: tf.random.normal([], seed=4),
        )

    first = tf.random.uniform([], seed=3)
    of_loop = tf.map_fn(draw, tf.range(4), fn_output_signature=tf.float32)
    return tf.concat([of_loop, [first]], 0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "body", [in_loop, in_nested_loops, in_calls_in_loop, in_loop_and_condition]
)
def test_each_iteration_of_a_loop_draws_another_number(body, compiled):
    draws = all_draws(of_steps(body, compiled))
    assert len(set(draws.tolist())) == len(draws)


def test_loops_with_the_same_seeds_draw_the_same():
    """So an image and its mask are flipped alike, as in plain Keras."""

    def body():
        return tf.stack([in_loop(), in_loop()])

    first, second = of_steps(body)(5)
    np.testing.assert_array_equal(first, second)


def test_operations_with_the_same_seeds_draw_the_same_and_others_do_not():
    def body():
        drawn = [tf.random.uniform([2], seed=3), tf.random.uniform([2], seed=3)]
        return [*drawn, tf.random.uniform([2], seed=4)]

    first, second, third = of_steps(body)(0)
    np.testing.assert_array_equal(first, second)
    assert not np.any(np.equal(first, third))


def test_switch_and_gradient():
    def body():
        x = tf.constant(2.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.switch_case(
                tf.cast(x, tf.int32) - 1,
                [lambda: x, lambda: x * tf.random.uniform([], seed=3)],
            )
        return tf.stack([y, 2 * tape.gradient(y, x)])

    step = of_steps(body)
    for number in range(3):
        value, gradient = step(number)
        assert value == gradient
    assert len(set(all_draws(step).tolist())) == 50


def test_replicas_draw_by_their_own_counts():
    def body(*counts):
        first = tf.random.uniform([], seed=3)
        body.end_of_first = len(tf.compat.v1.get_default_graph().get_operations())
        return first, tf.random.uniform([], seed=3)

    def make(compute):
        return tf.function(compute, autograph=False).get_concrete_function(COUNT, COUNT)

    function = make(body)
    drawing = with_draws_of_step(
        function,
        [tensor.op.name for tensor in function.inputs],
        lambda place: int(place >= body.end_of_first),
        make,
        compiled=False,
    )
    counts = [tf.constant([0, number], tf.int64) for number in range(3)]
    first, second = drawing(counts[0], counts[1])
    assert first != second
    assert second == drawing(counts[1], counts[2])[0]


def test_captures_and_structures_remain():
    large = tf.random.stateless_uniform([1000], [1, 2])
    variable = tf.Variable(2.0)

    def body(count):
        return {"a": large * tf.random.uniform([], seed=3), "b": None, "c": [variable + 1.0, count]}

    function = concrete(body)
    drawing = with_draws_of_step(
        function, [function.inputs[0].op.name], lambda place: 0, concrete, compiled=False
    )
    result = drawing(tf.constant([0, 1], tf.int64))
    assert result["b"] is None
    assert result["c"][0] == 3.0
    assert result["a"].shape == [1000]
    assert [id(outer) for outer in drawing.captured_inputs] == [
        id(outer) for outer in function.captured_inputs
    ]


def test_inputs_that_nothing_uses_remain():
    def body(count, unused):
        return tf.random.uniform([], seed=3), count

    def make(compute):
        return tf.function(compute, autograph=False).get_concrete_function(COUNT, COUNT)

    function = make(body)
    name = function.inputs[0].op.name
    drawing = with_draws_of_step(function, [name], lambda place: 0, make, compiled=False)
    count = tf.constant([0, 1], tf.int64)
    assert drawing(count, count)[1][1] == 1


def learned():
    return tf.random.learned_unigram_candidate_sampler(TRUE, 2, 5, True, 1000, seed=3)[0]


def in_dataset():
    dataset = tf.data.Dataset.range(4).map(lambda _: tf.random.uniform([], seed=3))
    return dataset.reduce(0.0, lambda total, number: total + number)


@pytest.mark.parametrize("body", [learned, in_dataset])
def test_an_operation_without_a_counterpart_loses_its_seed(body):
    """Two copies in one graph draw different numbers, and so do two graphs."""
    draws = [np.array(of_steps(body)(0)) for _ in range(2)]
    assert not np.array_equal(*draws)


def test_a_sampler_that_has_too_few_classes_fails_as_tensorflow_does():
    step = of_steps(sampler(tf.random.uniform_candidate_sampler, unique=True, range_max=3))
    with pytest.raises(tf.errors.InvalidArgumentError, match="Sampler"):
        step(0)


def test_every_random_operation_of_tensorflow_is_known():
    """A new operation with seeds needs a decision, and a line in docs/compatibility.md."""
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session as session

    listed = op_def_pb2.OpList.FromString(session.TF_GetBuffer(session.TF_GetAllOpList()))
    seeded = {op.name for op in listed.op if any(a.name == "seed2" for a in op.attr)}
    without_counterpart = {
        "CudnnRNN",
        "CudnnRNNBackprop",
        "CudnnRNNBackpropV2",
        "CudnnRNNBackpropV3",
        "CudnnRNNV2",
        "CudnnRNNV3",
        "FractionalAvgPool",
        "FractionalMaxPool",
        "LearnedUnigramCandidateSampler",
        "RandomCrop",  # TensorFlow no longer makes this and `RandomPoisson`
        "RandomPoisson",
        "RandomShuffleQueue",
        "RandomShuffleQueueV2",
        "ThreadUnsafeUnigramCandidateSampler",
    }
    known = {*stateless_draws.ALIKE, *stateless_draws.WRITTEN, *random_operations.HARMLESS}
    assert seeded == known | without_counterpart
    assert set(stateless_draws.COMPILED) <= known
