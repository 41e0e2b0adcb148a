"""Checks of the arguments of a `DynamicEmbedding`, and of where it is called."""

from __future__ import annotations

import contextlib
import operator
import re
from typing import NoReturn, SupportsIndex

import tensorflow as tf

from kerasps.errors import InputError, UnsupportedError

# The scope in which `tf.vectorized_map` traces its function once, and the number of the element.
_MAP_SCOPE, _ELEMENT = re.compile(r"(?:.*/)?loop_body(?:_\d+)?(?=/|$)"), "PlaceholderWithDefault"


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


def refuse_vectorized_map(layer: str) -> None:
    """Raise `UnsupportedError` if a layer is called in a `tf.vectorized_map`."""
    scope = None if tf.executing_eagerly() else _MAP_SCOPE.match(tf.get_current_name_scope())
    if scope is None:
        return
    with contextlib.suppress(KeyError):  # a scope of the user
        tf.compat.v1.get_default_graph().get_operation_by_name(f"{scope[0]}/{_ELEMENT}")
        raise UnsupportedError(
            f"The layer {layer!r} is called in a `tf.vectorized_map`, which would look up each id "
            "alone, and has no rule for it. Expected: one call of the layer, on all ids. Received: "
            "a call for each element. Call it outside of the map: ids may have any shape."
        )
