"""Updates that couple the rows of a variable, and what is said of them in shards."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.step.records.packing import specs_of
from kerasps.step.updates.coupling import coupling_of, refusal
from support.local_variables import make_optimizer_local, patch_optimizers, update_of
from support.optimizers import NOT_ELEMENTWISE, OPTIMIZERS


@pytest.fixture(autouse=True)
def optimizers(monkeypatch):
    patch_optimizers(monkeypatch)


def built(optimizer, *, name="kernel", constraint=None, num_shards=1):
    """Build an optimizer of a matrix of four rows, and return it with the matrix."""
    with keras.name_scope("layer"):
        variable = keras.Variable(np.ones((4, 2), "float32"), name=name)
    variable._constraint = constraint
    other = keras.Variable(np.ones((4, 2), "float32"))
    optimizer.build([variable, other])
    make_optimizer_local(optimizer, num_shards)
    return optimizer, variable


def coupling(optimizer, **of_variable):
    optimizer, variable = built(optimizer, **of_variable)
    update = update_of(optimizer, [])
    scalars = specs_of(update.tensors.scalars)
    return coupling_of(optimizer, variable, tf.float32, scalars, update.shared)


# Without hooks, weight decay is not traced; a loss scale has no update.
@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"adamw", "loss_scale"}))
def test_the_graph_tells_what_keras_optimizers_do(name):
    assert (coupling(OPTIMIZERS[name]()) is None) == (name not in NOT_ELEMENTWISE)


@pytest.mark.parametrize("name", [name for name in NOT_ELEMENTWISE if name == "muon"])
def test_muon_treats_the_rows_of_an_embedding_alone(name):
    assert coupling(OPTIMIZERS[name](), name="embeddings_of_embedding") is None


class Changed(keras.optimizers.SGD):
    """SGD with momentum, of a changed gradient."""

    def __init__(self, change):
        super().__init__(0.1, momentum=0.9)
        self.change = change

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(self.change(self, gradient, variable), variable, learning_rate)


norm = keras.ops.norm
CONSTANT = tf.constant(0.5)
ALONE = {
    "norm of each row": lambda _, g, v: g / norm(g + v, axis=1, keepdims=True),
    "mean of each row": lambda _, g, v: g - keras.ops.mean(g, axis=-1, keepdims=True),
    "a tensor at hand": lambda _, g, v: g * CONSTANT,
    "its slot": lambda self, g, v: g + self.momentums[self._get_variable_index(v)],
}
COUPLED = {
    "norm": (lambda _, g, v: g / norm(g), "the operation Sum "),
    "norm of each column": (lambda _, g, v: g / norm(v, axis=0), "the operation Sum "),
    "product": (lambda _, g, v: g @ (keras.ops.transpose(v) @ g), "the operation MatMul "),
    "shape": (lambda _, g, v: g / tf.cast(tf.shape(g)[0], "float32"), "the operation Shape "),
    "number of rows": (lambda _, g, v: g / v.shape[0], r"the number of rows \(ValueError: "),
    "rows of a constant": (lambda _, g, v: g * tf.range(8.0)[::2, None], "the operation AddV2 "),
    "a number at random": (lambda _, g, v: g * tf.random.uniform([]), "the operation RandomUni"),
    "misaligned": (lambda _, g, v: g * g[:, 0][:2], "the operation Mul "),
}


@pytest.mark.parametrize("what", ALONE)
def test_an_optimizer_of_ones_own_that_treats_rows_alone_is_known_by_its_graph(what):
    assert coupling(Changed(ALONE[what])) is None


@pytest.mark.parametrize("what", COUPLED)
def test_so_is_one_that_couples_rows(what):
    change, how = COUPLED[what]
    with pytest.raises(AssertionError, match=how):
        assert coupling(Changed(change)) is None


REFUSALS = {
    "optimizer": (
        lambda: keras.optimizers.Lamb(name="lamb"), None, "The update of optimizer 'lamb'",
        "another optimizer, such as Adam or Adagrad",
    ),
    "constraint": (
        lambda: keras.optimizers.Adam(), keras.constraints.UnitNorm(0), "The constraint UnitNorm",
        r"a constraint of each row, such as `MaxNorm\(axis=1\)`",
    ),
    "clipping": (
        lambda: keras.optimizers.Adam(gradient_accumulation_steps=2, clipnorm=1, name="adam"),
        None,
        "Optimizer 'adam' with `clipnorm` and `gradient_accumulation_steps`",
        "`global_clipnorm` or `clipvalue`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_the_error_names_what_couples_rows_and_the_two_ways_out(what):
    make, constraint, named, instead = REFUSALS[what]
    optimizer, variable = built(make(), constraint=constraint, num_shards=2)
    with pytest.raises(
        UnsupportedError,
        match=f"{named} couples the rows of 'layer/kernel', which is in 2 shards.* Expected: .*"
        f"Received: how it does. Keep such variables whole, .* or take {instead}.$",
    ):
        raise refusal(optimizer, variable, "how it does")
