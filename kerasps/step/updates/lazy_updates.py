"""Says once that an optimizer updates only the rows of a batch, where plain Keras moves others too.

`sparse_updates` is "lazy" by default. SGD without momentum and Adagrad then equal plain Keras;
Adam, RMSprop and others do not. Users who have not chosen should know.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import keras

from kerasps.step.updates.optimizers import moves_rows_without_gradient
from kerasps.variables import ParameterServerVariable

_LOGGER = logging.getLogger("kerasps")

_MOST_NAMES = 3


class LazyUpdates:
    """Tells users of lazy updates, once for each class of optimizer."""

    def __init__(self) -> None:
        # Whether `sparse_updates` is "lazy" because the user has not chosen.
        self.is_default = False
        self._told: set[type] = set()

    def note(
        self, optimizer: keras.optimizers.Optimizer, tables: Sequence[ParameterServerVariable]
    ) -> None:
        """Note that the steps of a training update only the touched rows of these tables."""
        kind = type(optimizer)
        if not self.is_default or kind in self._told:
            return
        # A table without a vocabulary has no other rows.
        moved = [
            table
            for table in tables
            if table.has_whole_value and moves_rows_without_gradient(optimizer, table)
        ]
        if not moved:
            return
        self._told.add(kind)
        names = ", ".join(f"'{table.path}'" for table in moved[:_MOST_NAMES])
        if len(moved) > _MOST_NAMES:
            names += f" and {len(moved) - _MOST_NAMES} more"
        _LOGGER.warning(
            f"{kind.__name__} updates lazily: of {names}, each step moves only the rows of its "
            "batch. In plain Keras it also moves rows, or their slots, that have no gradient. For "
            'that, pass `sparse_updates="dense"` to the strategy; each update then costs a ps the '
            'whole table. `sparse_updates="lazy"` keeps lazy updates without this message.'
        )
