"""Every optimizer that Keras ships, and one that couples the rows of a variable."""

from __future__ import annotations

import keras

from support.versions import KERAS

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "rmsprop_centered": lambda: keras.optimizers.RMSprop(0.01, momentum=0.9, centered=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "adamax": lambda: keras.optimizers.Adamax(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.05, l1_regularization_strength=0.001),
    "lion": lambda: keras.optimizers.Lion(0.001),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), dynamic_growth_steps=10
    ),
}
if KERAS < (3, 13):
    del OPTIMIZERS["muon"]  # fails in plain Keras too, with TensorFlow
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
    OPTIMIZERS["schedule_free_adamw"] = lambda: keras.optimizers.ScheduleFreeAdamW(0.01)

# Those whose update of a row depends on the other rows.
NOT_ELEMENTWISE = [name for name in ("adafactor", "lamb", "muon") if name in OPTIMIZERS]


class RowRatios(keras.optimizers.Optimizer):
    """Scales updates by norms, with slots of the variable's shape, of its columns, and of all pairs
    of columns.
    """

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self._momenta = self.add_optimizer_variables(variables, "momentum")
        self._columns = [self.add_variable(shape=v.shape[-1:], name="columns") for v in variables]
        self._pairs = [
            self.add_variable(shape=(v.shape[-1], v.shape[-1]), name="pairs") for v in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        index = self._get_variable_index(variable)
        momentum, columns, pairs = self._momenta[index], self._columns[index], self._pairs[index]
        flat = keras.ops.reshape(gradient, (-1, variable.shape[-1]))
        self.assign(momentum, 0.9 * momentum + gradient)
        self.assign(
            columns, keras.ops.maximum(0.9 * columns, keras.ops.max(keras.ops.abs(flat), axis=0))
        )
        self.assign_add(pairs, keras.ops.matmul(keras.ops.transpose(flat), flat))
        norm = keras.ops.norm(variable) / (keras.ops.norm(momentum) + 1.0)
        step = momentum / (columns + 1e-3) * (0.1 + norm) / (1.0 + keras.ops.trace(pairs))
        self.assign(variable, 0.999 * variable - learning_rate * step)
