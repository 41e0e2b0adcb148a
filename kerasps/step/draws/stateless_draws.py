"""The stateless counterparts of TensorFlow's random operations with state.

Each draws by a seed from the distribution of the operation that it replaces. TensorFlow has some as
operations (`ALIKE`). The others are written here, as functions of a seed and of the operation's
inputs. XLA compiles none of the former, so it has a list of functions (`COMPILED`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

# The stateless operation with the same inputs, one of which is the seed, and the seed's place.
ALIKE = {
    "Multinomial": ("StatelessMultinomial", 2),
    "RandomStandardNormal": ("StatelessRandomNormal", 1),
    "RandomUniform": ("StatelessRandomUniform", 1),
    "RandomUniformInt": ("StatelessRandomUniformInt", 1),
    "SampleDistortedBoundingBoxV2": ("StatelessSampleDistortedBoundingBox", 3),
    "TruncatedNormal": ("StatelessTruncatedNormal", 1),
}
_MIN_DRAWS = 64

_Attributes = Mapping[str, Any]
_Number = Any


@dataclass(frozen=True)
class Written:
    """A counterpart that is written here."""

    draw: Callable[..., Any]  # returns the outputs, given the attributes, the seed and the inputs
    inputs: tuple[str | tf.DType, ...]  # the dtypes of the inputs, or the attributes that have them
    outputs: tuple[str, ...] = ("output",)  # the names of the outputs
    loops: bool = False  # whether it may have a loop

    def function(self, attributes: _Attributes) -> Any:
        """Return a concrete function of the seed and the inputs."""
        dtypes = [
            tf.as_dtype(attributes[given].type) if isinstance(given, str) else given
            for given in self.inputs
        ]

        def draw(seed: tf.Tensor, *inputs: tf.Tensor) -> Any:
            return self.draw(attributes, seed, *inputs)

        # TensorFlow would inline a loop into the step graph's, see `Tracer._trace_function`.
        attrs = {"_noinline": True} if self.loops else None
        function = tf.function(draw, autograph=False, experimental_attributes=attrs)
        with tf.init_scope():
            return function.get_concrete_function(
                tf.TensorSpec([2], tf.int64), *(tf.TensorSpec(None, dtype) for dtype in dtypes)
            )


def can_replace(node: tf.compat.v1.NodeDef, *, compiled: bool) -> bool:
    """Return True if there is a counterpart of an operation."""
    if compiled:
        return node.op in COMPILED
    if node.op in ALIKE:
        return True
    if node.op == "FixedUnigramCandidateSampler":
        num_classes = sum(frequency > 0 for frequency in node.attr["unigrams"].list.f)
        is_whole = not node.attr["vocab_file"].s and node.attr["num_shards"].i <= 1
        return is_whole and num_classes > 0 and _can_sample(node, num_classes)
    if node.op in WRITTEN and "range_max" in node.attr:
        return _can_sample(node, node.attr["range_max"].i)
    return node.op in WRITTEN


def _can_sample(node: tf.compat.v1.NodeDef, num_classes: int) -> bool:
    """Return True if a sampler has enough classes; TensorFlow's kernel has the error if not."""
    return not node.attr["unique"].b or node.attr["num_sampled"].i <= num_classes


# Numbers


def _shuffled(_: _Attributes, seed: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    keys = tf.random.stateless_uniform(tf.shape(value)[:1], seed, None, None, tf.int32)
    return tf.cond(
        tf.rank(value) > 0, lambda: tf.gather(value, tf.argsort(keys)), lambda: tf.identity(value)
    )


def _uniform(attributes: _Attributes, seed: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    return tf.random.stateless_uniform(shape, seed, dtype=attributes["dtype"].type)


def _integers(
    _: _Attributes, seed: tf.Tensor, shape: tf.Tensor, low: tf.Tensor, high: tf.Tensor
) -> tf.Tensor:
    return tf.random.stateless_uniform(shape, seed, low, high, low.dtype)


def _normal(attributes: _Attributes, seed: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    return tf.random.stateless_normal(shape, seed, dtype=attributes["dtype"].type)


def _truncated(attributes: _Attributes, seed: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    return tf.random.stateless_truncated_normal(shape, seed, dtype=attributes["dtype"].type)


def _categorical(
    attributes: _Attributes, seed: tf.Tensor, logits: tf.Tensor, num: tf.Tensor
) -> Any:
    # The largest of the logits plus Gumbel noise.
    rows, classes = tf.unstack(tf.shape(logits), num=2)
    fractions = tf.random.stateless_uniform([rows, num, classes], seed, minval=1e-30)
    noise = -tf.math.log(-tf.math.log(fractions))
    chosen = tf.argmax(tf.cast(logits, tf.float32)[:, None] + noise, 2)
    return tf.cast(chosen, attributes["output_dtype"].type)


def _gamma(_: _Attributes, seed: tf.Tensor, shape: tf.Tensor, alpha: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.StatelessRandomGammaV2(
        shape=_followed_by(shape, alpha), seed=seed, alpha=alpha
    )


def _poisson(attributes: _Attributes, seed: tf.Tensor, shape: tf.Tensor, rate: tf.Tensor) -> Any:
    full = _followed_by(shape, rate)
    dtype = tf.as_dtype(attributes["dtype"].type)
    return tf.raw_ops.StatelessRandomPoisson(
        shape=full, seed=seed, lam=tf.broadcast_to(rate, full), dtype=dtype
    )


def _followed_by(shape: tf.Tensor, parameter: tf.Tensor) -> tf.Tensor:
    """Return the shape of draws of `shape` for each element of a parameter."""
    return tf.concat([tf.cast(shape, tf.int32), tf.shape(parameter)], 0)


def _parameterized(
    _: _Attributes, seed: tf.Tensor, shape: tf.Tensor, *parameters: tf.Tensor
) -> Any:
    means, stddevs, minvals, maxvals = _of_first_axis(shape, parameters)
    return tf.raw_ops.StatelessParameterizedTruncatedNormal(
        shape=shape, seed=seed, means=means, stddevs=stddevs, minvals=minvals, maxvals=maxvals
    )


def _of_first_axis(shape: tf.Tensor, parameters: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Return parameters in a shape; each is one number, or one for each place of the first axis."""
    ones = tf.ones_like(shape, tf.int32)[1:]
    return [
        tf.broadcast_to(tf.reshape(given, tf.concat([[tf.size(given)], ones], 0)), shape)
        for given in parameters
    ]


def _compiled_parameterized(
    attributes: _Attributes, seed: tf.Tensor, shape: tf.Tensor, *given: tf.Tensor
) -> Any:
    # By the inverse of the distribution function.
    dtype = tf.as_dtype(attributes["dtype"].type)
    mean, stddev, low, high = _of_first_axis(shape, given)
    first, last = (
        tf.math.erfc((mean - end) / (stddev * np.sqrt(2).astype(dtype.as_numpy_dtype))) / 2
        for end in (low, high)
    )
    fraction = tf.random.stateless_uniform(shape, seed, dtype=dtype)
    drawn = mean + stddev * tf.math.ndtri(first + fraction * (last - first))
    return tf.clip_by_value(drawn, low, high)


def _box(attributes: _Attributes, seed: tf.Tensor, size: tf.Tensor, boxes: tf.Tensor) -> Any:
    return tuple(
        tf.raw_ops.StatelessSampleDistortedBoundingBox(
            image_size=size,
            bounding_boxes=boxes,
            min_object_covered=attributes["min_object_covered"].f,
            seed=seed,
            aspect_ratio_range=list(attributes["aspect_ratio_range"].list.f),
            area_range=list(attributes["area_range"].list.f),
            max_attempts=attributes["max_attempts"].i,
            use_image_if_no_bounding_boxes=attributes["use_image_if_no_bounding_boxes"].b,
        )
    )


# Samplers of classes


def _uniform_classes(attributes: _Attributes, seed: tf.Tensor, true: tf.Tensor) -> Any:
    num_classes = attributes["range_max"].i

    def draw(seed: tf.Tensor, num: _Number) -> tf.Tensor:
        return tf.cast(_fractions(seed, num) * num_classes, tf.int64)

    return _sampled(
        attributes, seed, true, draw, lambda ids: tf.ones_like(ids, tf.float64) / num_classes
    )


def _log_uniform_classes(attributes: _Attributes, seed: tf.Tensor, true: tf.Tensor) -> Any:
    num_classes = attributes["range_max"].i
    log_range = np.log1p(float(num_classes))

    def draw(seed: tf.Tensor, num: _Number) -> tf.Tensor:
        ids = tf.cast(tf.exp(_fractions(seed, num) * log_range), tf.int64) - 1
        return tf.math.floormod(ids, num_classes)

    def probability(ids: tf.Tensor) -> tf.Tensor:
        return tf.math.log((ids + 2) / (ids + 1)) / log_range

    return _sampled(attributes, seed, true, draw, probability)


def _unigram_classes(attributes: _Attributes, seed: tf.Tensor, true: tf.Tensor) -> Any:
    frequencies = np.power(list(attributes["unigrams"].list.f), attributes["distortion"].f)
    weights = np.concatenate([np.zeros(attributes["num_reserved_ids"].i), frequencies])
    sums = np.cumsum(weights)
    probabilities = tf.constant(weights / sums[-1], tf.float64)
    ends = tf.constant(sums / sums[-1], tf.float64)

    def draw(seed: tf.Tensor, num: _Number) -> tf.Tensor:
        return tf.searchsorted(ends, _fractions(seed, num), side="right", out_type=tf.int64)

    return _sampled(
        attributes, seed, true, draw, lambda ids: tf.gather(probabilities, tf.cast(ids, tf.int64))
    )


def _fractions(seed: tf.Tensor, num: _Number) -> tf.Tensor:
    """Return `num` numbers from 0 to less than 1."""
    return tf.raw_ops.StatelessRandomUniform(shape=[num], seed=seed, dtype=tf.float64)


def _sampled(
    attributes: _Attributes,
    seed: tf.Tensor,
    true: tf.Tensor,
    draw: Callable[[tf.Tensor, _Number], tf.Tensor],
    probability: Callable[[tf.Tensor], tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Return sampled classes, and how often the true and the sampled ones are expected."""
    num_sampled = attributes["num_sampled"].i
    if attributes["unique"].b:
        ids, num_draws = _different(seed, num_sampled, draw)
    else:
        ids, num_draws = draw(seed, num_sampled), tf.constant(num_sampled, tf.int64)

    def expected(classes: tf.Tensor) -> tf.Tensor:
        chance = probability(tf.cast(classes, tf.float64))
        in_draws = -tf.math.expm1(tf.cast(num_draws, tf.float64) * tf.math.log1p(-chance))
        # As TensorFlow's kernels: with replacement, or if no class came twice, it is a sum.
        is_sum = tf.equal(num_draws, num_sampled)
        return tf.cast(tf.where(is_sum, chance * num_sampled, in_draws), tf.float32)

    return ids, expected(true), expected(ids)


def _different(
    seed: tf.Tensor, num_sampled: int, draw: Callable[[tf.Tensor, _Number], tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Draw until so many classes have come; return them in their order, and the number of draws."""

    def are_few(ids: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return tf.size(tf.unique(ids).y) < num_sampled

    def with_more(ids: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        seed = tf.raw_ops.StatelessRandomUniformFullInt(shape=[2], seed=seed, dtype=tf.int64)
        return tf.concat([ids, draw(seed, tf.size(ids))], 0), seed

    first = draw(seed, max(2 * num_sampled, _MIN_DRAWS))
    shapes = tf.TensorShape([None]), tf.TensorShape([2])
    ids, _ = tf.while_loop(are_few, with_more, (first, seed), shapes, parallel_iterations=1)
    different, places = tf.unique(ids, tf.int64)
    last = tf.argmax(tf.cast(tf.equal(places, num_sampled - 1), tf.int32))
    return different[:num_sampled], last + 1


_OF_SAMPLERS = ("sampled_candidates", "true_expected_count", "sampled_expected_count")

WRITTEN = {
    "FixedUnigramCandidateSampler": Written(_unigram_classes, (tf.int64,), _OF_SAMPLERS, True),
    "LogUniformCandidateSampler": Written(_log_uniform_classes, (tf.int64,), _OF_SAMPLERS, True),
    "ParameterizedTruncatedNormal": Written(_parameterized, ("T", *["dtype"] * 4)),
    "RandomGamma": Written(_gamma, ("S", "T")),
    "RandomPoissonV2": Written(_poisson, ("S", "R")),
    "RandomShuffle": Written(_shuffled, ("T",)),
    "SampleDistortedBoundingBox": Written(_box, ("T", tf.float32), ("begin", "size", "bboxes")),
    "UniformCandidateSampler": Written(_uniform_classes, (tf.int64,), _OF_SAMPLERS, True),
}
COMPILED = {
    "Multinomial": Written(_categorical, ("T", tf.int32)),
    "ParameterizedTruncatedNormal": Written(_compiled_parameterized, ("T", *["dtype"] * 4)),
    "RandomShuffle": WRITTEN["RandomShuffle"],
    "RandomStandardNormal": Written(_normal, ("T",)),
    "RandomUniform": Written(_uniform, ("T",)),
    "RandomUniformInt": Written(_integers, ("T", "Tout", "Tout")),
    "TruncatedNormal": Written(_truncated, ("T",)),
}
