"""Variables on ps convert to numbers, arrays and tensors as plain ones do, whole or in shards."""

from __future__ import annotations

import keras
import numpy as np

from kerasps.variables.rows import row_pools
from support.conversions import conversions, embeddings, small_variables


def variables():
    """Variables of which the large ones are in shards, where variables of 512 bytes are."""
    large = np.arange(256.0, dtype="float32").reshape(64, 4)
    optimizer, kernel = keras.optimizers.Adam(), keras.Variable(large)
    optimizer.build([kernel])
    return {
        **small_variables(),
        "in shards": kernel,
        "integers in shards": keras.Variable(np.arange(200), dtype="int64"),
        "slot in shards": optimizer.variables[2],
        "table": embeddings(),
        "table of one row": embeddings(num_rows=1),
    }


def test_variables_convert_as_plain_ones_do(strategy, sharded, monkeypatch):
    sharded(2)
    # Tables share a storage on each ps.
    monkeypatch.setattr(row_pools, "NUM_SEPARATE", 0)
    plain = conversions(variables())
    with strategy.scope():
        made = variables()
    assert len(made["in shards"].shards) == 2
    assert conversions(made) == plain


def test_what_is_printed_of_a_variable_in_shards_is_not_its_value(strategy, sharded):
    sharded(2)
    with strategy.scope():
        variable = keras.Variable(np.zeros((64, 4), "float32"), name="kernel")
    assert repr(variable) == (
        "<Variable path=kernel, shape=(64, 4), dtype=float32, "
        "value=<ShardedStorage 'kernel' shape=(64, 4) dtype=float32 shards=2>>"
    )
