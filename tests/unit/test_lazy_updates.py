"""Which optimizers move rows without gradient, found by their updates in plain Keras."""

import keras
import numpy as np
import pytest

from kerasps.step.updates.optimizers import moves_rows_without_gradient
from support.optimizers import OPTIMIZERS
from support.tables import EXACT

# Their updates of tables are always dense.
ALWAYS_DENSE = ("adafactor", "lamb", "muon", "loss_scale")
OPTIONS = {
    **{name: OPTIMIZERS[name] for name in OPTIMIZERS if name not in ALWAYS_DENSE},
    "sgd_decay": lambda: keras.optimizers.SGD(0.05, weight_decay=0.1),
    "adagrad_decay": lambda: keras.optimizers.Adagrad(0.05, weight_decay=0.1),
    "sgd_average": lambda: keras.optimizers.SGD(0.05, use_ema=True),
}


def rows_without_gradient(optimizer):
    """Returns a table, and two rows of it and of the slots before and after updates of others.

    One of the two had gradients before, the other never.
    """
    table = keras.Variable(np.ones((3, 4), "float32"), name="embeddings")
    optimizer.build([table])

    def states(row):
        slots = [v for v in optimizer.variables if tuple(v.shape) == (3, 4)]
        return [np.array(v)[row] for v in (table, *slots)]

    def update(row):
        gradient = np.zeros((3, 4), "float32")
        gradient[row] = 0.5
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [table])

    never = states(1)
    update(0)
    update(0)
    before = states(0)
    update(2)
    return table, [*never, *before], [*states(1), *states(0)]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_rule_is_what_plain_keras_does(name):
    optimizer = OPTIONS[name]()
    table, before, after = rows_without_gradient(optimizer)
    moves = any(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert moves_rows_without_gradient(optimizer, table) == moves
    assert moves == (name not in EXACT)


class Signs(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * keras.ops.sign(gradient))


def test_an_optimizer_of_ones_own_counts_by_its_slots():
    table = keras.Variable(np.ones((2, 4), "float32"))
    for optimizer, moves in ((Signs(0.1), False), (Signs(0.1, momentum=0.9), True)):
        optimizer.build([table])
        assert moves_rows_without_gradient(optimizer, table) == moves
