"""The figures of tables without a vocabulary, in the logs of epochs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from kerasps import checks
from kerasps.layers.dynamic_embedding import DynamicEmbedding


class TableMetrics(keras.callbacks.Callback):
    """Adds the figures of tables without a vocabulary to the logs of each epoch.

    Callbacks later in the list, `History` too, get these numbers for each `DynamicEmbedding`, as
    `<layer>_<number>`. They are sums over all ps and workers. If layers share a name, the second
    one is `<layer>_1`, and so on.

    - `rows`, and `share_of_max_rows` if the layer has `max_rows`.
    - `inserted`, `evicted`, `dropped`: in this epoch, the rows that were made, the rows that were
      given up, and the gradients of ids that got no row.
    - With an eviction, `hit_rate`: the share of the ids of each step that had a row. And
      `age_of_evicted`: the mean number of steps since the last update of rows that were given up.
    - `norm_25`, `norm_50`, `norm_75`: quartiles of the Euclidean norms of some rows; NaN if there
      are none.

    ```python
    ids = keras.Input((), dtype="int64")
    rows = kerasps.layers.DynamicEmbedding(8, max_rows=100, name="items")(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(rows))
    model.compile("adagrad", "mse")
    history = model.fit(
        np.arange(50), np.ones(50), epochs=2, callbacks=[kerasps.TableMetrics()]
    ).history
    print(history["items_rows"], history["items_inserted"])
    ```

    Args:
        sample: how many places each ps draws for the quartiles; 0 for no quartiles. Default 1024.
    """

    def __init__(self, sample: int = 1024) -> None:
        super().__init__()
        problem = "Argument `sample` of TableMetrics cannot be used"
        self.sample = checks.count(problem, sample, least=0)
        self._before: dict[str, dict[str, int | float]] = {}

    def on_train_begin(self, logs: object = None) -> None:
        """Note the figures of earlier trainings."""
        self._before = {name: layer.figures() for name, layer in self._layers().items()}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add to `logs`."""
        for of_layer, layer in self._layers().items():
            figures = layer.figures()
            before = self._before.get(of_layer, {})
            self._before[of_layer] = figures
            found = _of_epoch(figures, before, has_eviction=layer.eviction is not None)
            if layer.max_rows is not None:
                found["share_of_max_rows"] = found["rows"] / layer.max_rows
            if self.sample:
                norms = layer.norms(self.sample)
                quartiles = np.percentile(norms if len(norms) else np.nan, (25, 50, 75)).tolist()
                found.update(zip(("norm_25", "norm_50", "norm_75"), quartiles, strict=True))
            if logs is not None:
                logs.update({f"{of_layer}_{name}": value for name, value in found.items()})

    def _layers(self) -> dict[str, DynamicEmbedding]:
        """Return the tables by their names in the logs."""
        found: dict[str, DynamicEmbedding] = {}
        for layer in self.model._flatten_layers():
            if isinstance(layer, DynamicEmbedding) and layer.built:
                same = (f"{layer.name}_{number}" for number in itertools.count(1))
                name = next(n for n in itertools.chain([layer.name], same) if n not in found)
                found[name] = layer
        return found


def _of_epoch(
    figures: Mapping[str, int | float], before: Mapping[str, int | float], *, has_eviction: bool
) -> dict[str, int | float]:
    """Return the numbers of an epoch from the figures after it and before it."""

    def change(name: str) -> int | float:
        past = before.get(name, 0)
        # They begin anew with a new table, such as after the loss of a ps.
        return figures[name] - past if figures[name] >= past else figures[name]

    evicted = change("evicted")
    dropped = change("refused_for_room") + change("refused_by_admission")
    found = {
        "rows": figures["rows"],
        "inserted": change("inserted"),
        "evicted": evicted,
        "dropped": dropped,
    }
    if has_eviction:
        found["hit_rate"] = 1 - (found["inserted"] + dropped) / max(change("pushed_ids"), 1)
        total, past = (
            numbers.get("mean_age_of_evicted", 0) * numbers.get("evicted", 0)
            for numbers in (figures, before)
        )
        found["age_of_evicted"] = (total - past if total >= past else total) / max(evicted, 1)
    return found
