"""A small layer with a table without a vocabulary."""

from __future__ import annotations

import keras
import numpy as np

from kerasps.dynamic.first_rows import FirstRows
from kerasps.dynamic.row_files import save_table
from kerasps.dynamic.rows_of_ids import MOST_ROWS, RowsOfIds


@keras.saving.register_keras_serializable(package="kerasps tests")
class AnyIds(keras.layers.Layer):
    def __init__(self, width, initializer="uniform", seed=1, max_rows=None, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.width, self.initializer = width, keras.initializers.get(initializer)
        self.seed, self.max_rows = seed, max_rows

    def build(self, shape=None):
        first_rows = FirstRows.of(self.initializer, self.width, self.variable_dtype)
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(MOST_ROWS, self.width),
            initializer=RowsOfIds(first_rows, self.seed, self.max_rows),
        )

    def call(self, ids):
        return self.embeddings.take(ids)

    def compute_output_shape(self, shape):
        return (*shape, self.width)

    def get_config(self):
        return {
            **super().get_config(),
            "width": self.width,
            "initializer": keras.initializers.serialize(self.initializer),
            "seed": self.seed,
            "max_rows": self.max_rows,
        }

    def save_own_variables(self, store):
        save_table(store, self.embeddings)

    def load_own_variables(self, store):
        self.embeddings.replace_rows(np.asarray(store["ids"]), store["rows"])
