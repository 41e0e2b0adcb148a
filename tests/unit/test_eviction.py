"""The arguments of an `Eviction`, and removal of rows in one process."""

import datetime

import keras
import numpy as np
import pytest

import kerasps
from kerasps.layers import DynamicEmbedding, Eviction

EVERYTHING = {"order": "norm", "ttl_steps": 9, "ttl_seconds": 0.5, "low": 0.5, "min_rows": 3}


def test_a_configuration_makes_an_equal_eviction():
    eviction = Eviction(**EVERYTHING)
    assert eviction.get_config() == EVERYTHING
    assert Eviction.from_config(eviction.get_config()) == eviction
    assert hash(Eviction.from_config(eviction.get_config())) == hash(eviction)
    assert eviction != Eviction(**{**EVERYTHING, "low": 0.6})
    layer = DynamicEmbedding(4, max_rows=100, max_bytes_per_ps=10_000, eviction=eviction)
    again = DynamicEmbedding.from_config(layer.get_config())
    assert (again.eviction, again.max_bytes_per_ps) == (eviction, 10_000)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"order": "fifo"}, ValueError, "order"),
        ({"ttl_steps": 0}, ValueError, "`ttl_steps` of an Eviction"),
        ({"ttl_steps": 1.5}, TypeError, "`ttl_steps` of an Eviction"),
        ({"ttl_seconds": 0}, kerasps.InputError, "a number of seconds above 0. Received: 0"),
        ({"ttl_seconds": True}, kerasps.InputError, "Received: True"),
        ({"ttl_seconds": float("nan")}, kerasps.InputError, "Received: nan"),
        ({"low": 1}, kerasps.InputError, "a number between 0 and 1. Received: 1"),
        ({"low": "0.9"}, kerasps.InputError, "Received: '0.9'"),
        ({"min_rows": -1}, ValueError, "`min_rows` of an Eviction"),
    ],
)
def test_arguments_that_cannot_be_used(options, error, message):
    with pytest.raises(error, match=message):
        Eviction(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Expected: a number, with `eviction`. Received: max_rows=None"),
        ({"max_bytes_per_ps": 0}, "Received: max_bytes_per_ps=0"),
        ({"max_bytes_per_ps": 1e6}, "Received: max_bytes_per_ps=1000000.0"),
        ({"max_rows": 10, "eviction": Eviction(min_rows=10)}, "`min_rows` of at most"),
        ({"max_rows": 10, "eviction": "lru"}, "an Eviction or None. Received: 'lru'"),
    ],
)
def test_arguments_of_a_layer_that_cannot_be_used(options, message):
    with pytest.raises(kerasps.InputError, match=message):
        DynamicEmbedding(4, **{"eviction": Eviction(), **options})


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer.evict_where(older_than=1),
        lambda layer: layer.evict_where(older_than=datetime.timedelta(days=1)),
        lambda layer: layer.evicted(),
    ],
)
def test_a_table_without_an_eviction_knows_no_use(use):
    layer = DynamicEmbedding(4, max_rows=10, name="users")
    layer.build()
    with pytest.raises(kerasps.UnsupportedError, match="of the layer 'users'"):
        use(layer)


@pytest.mark.parametrize("optimizer", [keras.optimizers.Adagrad, keras.optimizers.Adam])
def test_a_row_that_is_removed_by_hand_begins_anew_with_its_slots(optimizer):
    def trained(removed):
        keras.utils.set_random_seed(1)
        ids = keras.Input((), dtype="int64")
        table = DynamicEmbedding(4, max_rows=20, seed=3)
        # The other weights stay, so that the rows of different ids are independent.
        out = keras.layers.Dense(1, kernel_initializer="ones", trainable=False)(table(ids))
        model = keras.Model(ids, out)
        model.compile(optimizer(0.1), "mse")
        # Adam moves all rows of a table in one process, so both meet the id at one iteration.
        model.fit(np.arange(10), np.arange(10.0), batch_size=1, shuffle=False, verbose=0)
        assert table.evict(removed) == len(removed)
        assert table.num_rows == 10 - len(removed)
        model.fit(np.array([2, 5]), np.ones(2), batch_size=1, shuffle=False, verbose=0)
        return table

    table, other = trained([2, 9]), trained([])
    new = trained([2, 5])
    np.testing.assert_array_equal(table.rows([2]), new.rows([2]))
    np.testing.assert_array_equal(table.rows([5, 7]), other.rows([5, 7]))
    assert not np.array_equal(table.rows([2]), other.rows([2]))
    np.testing.assert_array_equal(table.rows([9]), DynamicEmbedding(4, seed=3)(np.array([9])))


def test_metrics_of_tables_in_one_process():
    ids = [keras.Input((), dtype="int64") for _ in range(2)]
    tables = [DynamicEmbedding(4, max_rows=50, name="users"), DynamicEmbedding(4, name="items")]
    rows = [table(of_table) for table, of_table in zip(tables, ids, strict=True)]
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    model.compile("sgd", "mse")
    x = [np.arange(80), np.arange(80) // 2]
    callbacks = [kerasps.TableMetrics()]
    logs = model.fit(x, np.ones(80), epochs=2, verbose=0, callbacks=callbacks).history
    assert logs["users_rows"] == [50, 50]
    assert logs["users_share_of_max_rows"] == [1.0, 1.0]
    assert logs["users_inserted"] == [50, 0]
    assert logs["users_dropped"][1] == 30
    assert logs["items_rows"] == [40, 40]
    assert "items_share_of_max_rows" not in logs
    norms = np.linalg.norm(tables[1].rows(range(40)), axis=1)
    assert logs["items_norm_50"][-1] == pytest.approx(np.median(norms))
    # Without tables, and without quartiles.
    plain = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    logs = plain.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=callbacks).history
    assert list(logs) == ["loss"]
    logs = model.fit(x, np.ones(80), verbose=0, callbacks=[kerasps.TableMetrics(0)]).history
    assert not [name for name in logs if "norm" in name]
    # The names are the same in each epoch, also while there are no rows.
    counted = DynamicEmbedding(4, max_rows=50, admission=kerasps.layers.CountAdmission(2), name="t")
    model = keras.Sequential([keras.Input((), dtype="int64"), counted, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    logs = model.fit(x[0], np.ones(80), epochs=2, verbose=0, callbacks=callbacks).history
    assert np.isnan(logs["t_norm_50"][0])
    assert logs["t_rows"] == [0, 50]
    assert logs["t_norm_50"][1] > 0
    with pytest.raises(TypeError, match="`sample` of TableMetrics"):
        kerasps.TableMetrics("all")


def test_tables_of_one_name_have_figures_of_their_own():
    def tower(name):
        ids = keras.Input((), dtype="int64")
        return keras.Model(ids, DynamicEmbedding(4, max_rows=50, name="items")(ids), name=name)

    towers, ids = [tower(name) for name in "ab"], [keras.Input((), dtype="int64") for _ in "ab"]
    rows = [of_one(each) for of_one, each in zip(towers, ids, strict=True)]
    model = keras.Model(ids, keras.layers.Dot(1)(rows))
    model.compile("sgd", "mse")
    x = [np.arange(40), np.arange(40) // 4]
    callbacks = [kerasps.TableMetrics()]
    logs = model.fit(x, np.ones(40), epochs=2, verbose=0, callbacks=callbacks).history
    assert (logs["items_rows"], logs["items_inserted"]) == ([40, 40], [40, 0])
    assert (logs["items_1_rows"], logs["items_1_inserted"]) == ([10, 10], [10, 0])
