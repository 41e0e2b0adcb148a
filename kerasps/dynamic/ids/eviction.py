"""Eviction: the rule by which rows of a table without a vocabulary are given up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from kerasps.checks import choice, count
from kerasps.errors import InputError

ORDERS = ("lru", "lfu", "age")


@keras.saving.register_keras_serializable(package="kerasps")
class Eviction:
    """Gives up rows of a table, a few in each step, so that new ids find room in `max_rows`.

    When a table has more than `low * max_rows` rows, each step gives up as many rows as it makes,
    and up to 64 more. For each one it draws 64 rows, and takes the first of them in `order`. So the
    mean rank of a victim in that order is 1/65 of the rows. A step never gives up the rows that it
    updates. An id that comes again begins anew, with its first row.

    ```python
    layer = kerasps.layers.DynamicEmbedding(
        16, max_rows=1_000_000, eviction=kerasps.layers.Eviction("lru")
    )
    ```

    Args:
        order: `"lru"`, the row whose last update was longest ago; `"lfu"`, the one with the fewest
            updates; `"age"`, the one that was made first. Default `"lru"`.
        ttl_steps: give up rows without an update in so many steps of all workers, too. Each step
            looks at 64 rows of a ps in turn. Default None: no such limit.
        low: the share of `max_rows` from which on rows are given up. Default 0.9.

    Raises:
        InputError: `order` or `low` is another value.
        TypeError: `ttl_steps` is not a whole number.
        ValueError: `ttl_steps` is less than 1.
    """

    def __init__(
        self, order: str = "lru", *, ttl_steps: int | None = None, low: float = 0.9
    ) -> None:
        choice("order", order, ORDERS)
        if ttl_steps is not None:
            ttl_steps = count("Argument `ttl_steps` of an Eviction cannot be used", ttl_steps)
        if not isinstance(low, (int, float)) or not 0 < low < 1:
            raise InputError(
                "Argument `low` of an Eviction cannot be used. Expected: a number between 0 and 1. "
                f"Received: {low!r}. Give a number like 0.9."
            )
        self.order, self.ttl_steps, self.low = order, ttl_steps, float(low)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {"order": self.order, "ttl_steps": self.ttl_steps, "low": self.low}

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Eviction:
        """Return the eviction with some arguments.

        Args:
            config: the arguments by their names, as `get_config` returns them.
        """
        return cls(**config)  # type: ignore[arg-type]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).items()))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"Eviction({given})"

    @property
    def num_columns(self) -> int:
        """The numbers that a ps keeps of the use of each row: the last, and that of the order."""
        return 1 if self.order == "lru" else 2


def eviction_of(argument: object) -> Eviction | None:
    """Return the eviction that the argument of a layer, or its configuration, describes."""
    found = argument
    if isinstance(argument, dict):
        found = keras.saving.deserialize_keras_object(argument)
    if found is not None and not isinstance(found, Eviction):
        raise InputError(
            "Argument `eviction` of a DynamicEmbedding has a value that cannot be used. Expected: "
            f"an Eviction or None. Received: {argument!r}. Give one, such as "
            "`kerasps.layers.Eviction('lru')`."
        )
    return found
