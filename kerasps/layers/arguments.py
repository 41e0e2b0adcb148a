"""Checks of the arguments of a `DynamicEmbedding`."""

from __future__ import annotations

import contextlib
import operator
from typing import NoReturn, SupportsIndex

from kerasps.errors import InputError


def whole_number(
    argument: str, value: object, advice: str, *, least: int | None = None, most: int | None = None
) -> int:
    """Return `value` as an `int` within bounds, or raise `InputError`."""
    expected = "a whole number"
    if least is not None:
        expected += f" of at least {least}" if most is None else f" from {least} to {most:,}"
    number = None
    # Users who pass True have mostly mixed up two arguments.
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        with contextlib.suppress(TypeError):  # an array
            number = operator.index(value)
    if (
        number is None
        or (least is not None and number < least)
        or (most is not None and number > most)
    ):
        refuse(argument, repr(value), expected, f"Give a whole number, {advice}")
    return number


def refuse(argument: str, received: object, expected: str, advice: str) -> NoReturn:
    """Raise the error of an argument."""
    raise InputError(
        f"Argument `{argument}` of a DynamicEmbedding has a value that cannot be used. Expected: "
        f"{expected}. Received: {argument}={received}. {advice}."
    )
