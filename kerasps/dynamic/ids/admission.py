"""Admission: the rule by which ids of a table without a vocabulary get rows."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps.checks import count
from kerasps.dynamic.ids.keys import mixed, salt_of
from kerasps.errors import InputError

# Added to ids before they are mixed, so that admission and first rows are independent.
_SALT = salt_of(-49)
# The bits of a key that are compared with a probability.
_BITS = 31


class Admission:
    """A rule by which the ids of a table get rows, each of them for good.

    Attributes:
        max_candidates: the most ids that are counted; None if none are.
    """

    max_candidates: int | None = None

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        raise NotImplementedError

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Any:
        """Return the admission with some arguments.

        Args:
            config: the arguments by their names, as `get_config` returns them.
        """
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), *vars(self).items()))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({given})"


@keras.saving.register_keras_serializable(package="kerasps")
class CountAdmission(Admission):
    """Makes the row of an id when training meets the id for the n-th time.

    A step counts an id once, however often its batch has it. In one process with
    `run_eagerly=True`, each call of the layer counts. A candidate is an id that has a count and no
    row. It takes 64 bytes on its ps.

    ```python
    layer = kerasps.layers.DynamicEmbedding(16, admission=kerasps.layers.CountAdmission(3))
    ```

    Args:
        n: the number of meetings, with the one that makes the row.
        max_candidates: the most candidates, over all ps. A further one replaces another, which is
            drawn at random and begins anew when it comes again. Default a million.

    Raises:
        TypeError: an argument is not a whole number.
        ValueError: an argument is less than 1.
    """

    max_candidates: int

    def __init__(self, n: int, *, max_candidates: int = 1_000_000) -> None:
        advice = "Give a number like 3."
        self.n = count("Argument `n` of a CountAdmission cannot be used", n, advice=advice)
        self.max_candidates = count(
            "Argument `max_candidates` of a CountAdmission cannot be used",
            max_candidates,
            advice="Give a number like 1_000_000.",
        )

    def get_config(self) -> dict[str, Any]:
        return {"n": self.n, "max_candidates": self.max_candidates}


@keras.saving.register_keras_serializable(package="kerasps")
class ProbabilityAdmission(Admission):
    """Lets a share of all ids have rows. The seed of the layer and the id decide.

    So an id is admitted at its first meeting or never, on any number of ps and in one process.

    ```python
    layer = kerasps.layers.DynamicEmbedding(16, admission=kerasps.layers.ProbabilityAdmission(0.1))
    ```

    Args:
        p: the share, above 0 and at most 1.

    Raises:
        InputError: `p` is another value.
    """

    def __init__(self, p: float) -> None:
        if not _is_share(p):
            raise InputError(
                "Argument `p` of a ProbabilityAdmission cannot be used. Expected: a number above 0 "
                f"and at most 1. Received: {p!r}. Give a number like 0.1."
            )
        self.p = float(p)

    def get_config(self) -> dict[str, Any]:
        return {"p": self.p}

    @property
    def bound(self) -> np.int64:
        """The number that the number of an id (see `drawn`) must be below."""
        return np.int64(round(self.p * 2**_BITS))


def _is_share(value: object) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and bool(0 < value <= 1)  # type: ignore[operator]


def drawn(ids: tf.Tensor, salts: tf.Tensor | np.int64) -> tf.Tensor:
    """Return a number for each id, evenly spread from 0 to 2**31 - 1.

    Args:
        salts: the salt of the seed of the table, or one for each id.
    """
    return tf.bitwise.bitwise_and(mixed(ids + salts + _SALT), np.int64(2**_BITS - 1))


def admission_of(argument: object) -> Admission | None:
    """Return the admission that the argument of a layer, or its configuration, describes."""
    found = argument
    if isinstance(argument, dict):
        found = keras.saving.deserialize_keras_object(argument)
    if found is not None and not isinstance(found, Admission):
        raise InputError(
            "Argument `admission` of a DynamicEmbedding has a value that cannot be used. Expected: "
            f"a CountAdmission, a ProbabilityAdmission or None. Received: {argument!r}. Give one "
            "of these, such as `kerasps.layers.CountAdmission(3)`."
        )
    return found
