"""What the tests of tables share."""

from __future__ import annotations

from support.optimizers import OPTIMIZERS

# Rows of 16 columns: then TensorFlow works on a few of them with the very instructions that it uses
# for all.
WIDTH = 16
# What they do to a row whose gradient is zero: nothing, so "lazy" is what plain Keras does.
EXACT = ["sgd", "adagrad"]


def compiled(model, optimizer="sgd", steps_per_execution=5, **arguments):
    optimizer = OPTIMIZERS[optimizer]() if isinstance(optimizer, str) else optimizer
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution, **arguments)
    return model


def is_table(model, variable):
    """Whether the training step reads `variable` by rows."""
    return variable.path in {table.name for table in model.train_function.traffic.tables}
