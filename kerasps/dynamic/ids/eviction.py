"""Eviction: the rule by which rows of a table without a vocabulary are given up."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import keras

from kerasps.checks import choice, count
from kerasps.errors import InputError

ORDERS = ("lru", "lfu", "age", "norm")


@keras.saving.register_keras_serializable(package="kerasps")
class Eviction:
    """Gives up rows of a table, a few in each step, so that new ids find room in `max_rows`.

    When a table has more than `low * max_rows` rows, every eighth step gives up as many rows as
    were made since, and up to 64 more. Each step does if another one with as many new rows would
    pass halfway from there to `max_rows`. For each eight rows to give up it draws 256, and takes
    the first eight of them in `order`. So the mean rank of a victim is 4.5/257 in a large table,
    where 0 is the first and 1 the last. A step never gives up the rows that it updates. An id that
    comes again begins anew, with its first row.

    ```python
    layer = kerasps.layers.DynamicEmbedding(
        16, max_rows=1_000_000, eviction=kerasps.layers.Eviction("lru")
    )
    ```

    Args:
        order: `"lru"`, the row whose last update was longest ago; `"lfu"`, the one with the fewest
            updates; `"age"`, the one that was made first; `"norm"`, the one with the smallest
            Euclidean norm. Default `"lru"`.
        ttl_steps: give up rows without an update in so many steps of all workers, too. Each step
            looks at 64 rows of a ps in turn. Default None: no such limit.
        ttl_seconds: the same, for rows without an update in so many seconds, by the clock of the
            ps. Default None: no such limit.
        low: the share of `max_rows` from which on rows are given up. Default 0.9.
        min_rows: the number of rows, over all ps, that are not given up. Default 0.

    Raises:
        InputError: `order`, `low` or `ttl_seconds` is another value.
        TypeError: `ttl_steps` or `min_rows` is not a whole number.
        ValueError: `ttl_steps` is less than 1, or `min_rows` less than 0.
    """

    def __init__(
        self,
        order: str = "lru",
        *,
        ttl_steps: int | None = None,
        ttl_seconds: float | None = None,
        low: float = 0.9,
        min_rows: int = 0,
    ) -> None:
        choice("order", order, ORDERS)
        if ttl_steps is not None:
            ttl_steps = count("Argument `ttl_steps` of an Eviction cannot be used", ttl_steps)
        if ttl_seconds is not None and not (_is_number(ttl_seconds) and 0 < ttl_seconds < 2**31):
            raise _refused("ttl_seconds", ttl_seconds, "a number of seconds above 0", "86_400")
        if not (_is_number(low) and 0 < low < 1):
            raise _refused("low", low, "a number between 0 and 1", "0.9")
        self.order, self.ttl_steps, self.low = order, ttl_steps, float(low)
        self.ttl_seconds = None if ttl_seconds is None else float(ttl_seconds)
        problem = "Argument `min_rows` of an Eviction cannot be used"
        self.min_rows = count(problem, min_rows, least=0)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        names = "order", "ttl_steps", "ttl_seconds", "low", "min_rows"
        return {name: getattr(self, name) for name in names}

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
    def columns(self) -> tuple[str, ...]:
        """The names of the numbers that a ps keeps of the use of each row.

        The tick of its last update; for some orders, the number of its updates or the tick in
        which it was made; the second of its last update, if rows have a time to live in seconds.
        """
        of_order = {"lfu": ("updates",), "age": ("made",)}.get(self.order, ())
        return ("used", *of_order, *(() if self.ttl_seconds is None else ("second",)))


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


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _refused(name: str, value: object, expected: str, example: str) -> InputError:
    return InputError(
        f"Argument `{name}` of an Eviction cannot be used. Expected: {expected}. Received: "
        f"{value!r}. Give a number like {example}."
    )
