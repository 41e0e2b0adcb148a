"""`fit` says once, for each class of optimizer, that tables are updated lazily."""

import logging

import keras
import numpy as np
import pytest

ROWS = 4096


def fitted(strategy, optimizer):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                keras.layers.Embedding(ROWS, 16, name="items"),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer, "mse")
    model.fit(np.arange(64).reshape(32, 2) % ROWS, np.ones(32), batch_size=8, verbose=0)


def said(caplog):
    return [text for text in caplog.messages if "updates lazily" in text]


class OneMoreAdam(keras.optimizers.Adam):
    pass


def test_it_is_said_once_for_each_class(strategy, caplog):
    with caplog.at_level(logging.INFO, "kerasps"):
        fitted(strategy, OneMoreAdam())
        (text,) = said(caplog)
        assert text.startswith("OneMoreAdam updates lazily: of '")
        assert "items/embeddings', each step moves only the rows of its batch" in text
        assert 'pass `sparse_updates="dense"` to the strategy' in text
        fitted(strategy, OneMoreAdam())
        assert said(caplog) == [text]


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adagrad])
def test_it_is_not_said_where_nothing_is_left_out(strategy, caplog, optimizer):
    with caplog.at_level(logging.INFO, "kerasps"):
        fitted(strategy, optimizer())
    assert said(caplog) == []


def test_it_is_not_said_without_tables(strategy, caplog):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(type("AdamWithoutTables", (keras.optimizers.Adam,), {})(), "mse")
    with caplog.at_level(logging.INFO, "kerasps"):
        model.fit(np.ones((32, 2)), np.ones(32), batch_size=8, verbose=0)
    assert said(caplog) == []


def test_it_is_not_said_to_those_who_have_chosen(strategy, caplog, monkeypatch):
    assert strategy.options.sparse_updates == "lazy"
    assert strategy.extended.host.lazy_updates.is_default
    monkeypatch.setattr(strategy.extended.host.lazy_updates, "is_default", False)
    with caplog.at_level(logging.INFO, "kerasps"):
        fitted(strategy, type("ChosenAdam", (keras.optimizers.Adam,), {})())
    assert said(caplog) == []
