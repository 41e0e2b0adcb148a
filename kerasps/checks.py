"""Checks of arguments: counts and time limits wherever one is given, and whether two are alike."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import types
from typing import Any


def count(
    problem: str,
    value: Any,
    *,
    least: int = 1,
    expected: str | None = None,
    received: str | None = None,
    advice: str = "Give a number like 2.",
) -> int:
    """Return `value` as an `int`, or raise an error that says what a count may be.

    Args:
        problem: the first sentence of the message, without its full stop.
        value: an integer of any type, NumPy's too. A bool is none.
        least: the smallest count. Default 1.
        expected: what the message says was expected. Default: a whole number of at least `least`.
        received: what it says was received. Default: the `repr` of `value`.
        advice: the last sentence of the message.

    Raises:
        TypeError: `value` is not an integer.
        ValueError: `value` is less than `least`.
    """
    expected = expected or f"a whole number of at least {least}"
    message = f"{problem}. Expected: {expected}. Received: {received or repr(value)}. {advice}"
    # Python takes True for the index 1; who passes it has mostly mixed up two arguments.
    if isinstance(value, bool):
        raise TypeError(message)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(message) from None
    if number < least:
        raise ValueError(message)
    return number


def seconds(
    problem: str,
    value: Any,
    *,
    received: str | None = None,
    advice: str = "Give a number like 60.",
) -> float:
    """Return `value` as a `float`, or raise an error that says what a time limit may be.

    Args:
        problem: the first sentence of the message, without its full stop.
        value: a positive, finite `int` or `float`, in seconds.
        received: what the message says was received. Default: the `repr` of `value`.
        advice: the last sentence of the message.

    Raises:
        TypeError: `value` is not a number.
        ValueError: `value` is not positive, or not finite.
    """
    message = (
        f"{problem}. Expected: a positive number of seconds. Received: {received or repr(value)}. "
        f"{advice}"
    )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(message)
    if not math.isfinite(value) or value <= 0:
        raise ValueError(message)
    return float(value)


def time_limit(limit: float | None, *, variable: str, default: float) -> float:
    """Return a time limit in seconds: an argument, else an environment variable, else a default.

    Args:
        limit: the argument `timeout_s`, or None.
        variable: the name of the environment variable.
        default: what holds where neither is given.

    Raises:
        ValueError: the limit is not a positive, finite number.
    """
    source, given, value = "timeout_s", repr(limit), limit
    if limit is None:
        text = os.environ.get(variable)
        if not text:
            return default
        source, given = variable, repr(text)
        with contextlib.suppress(ValueError):
            value = float(text)
    try:
        return seconds(
            f"{source} is not a time limit",
            value,
            received=given,
            advice="Give a number like 60, or leave it out.",
        )
    except (TypeError, ValueError) as exc:
        # Of one type, whichever way the limit came: an environment variable is always text.
        raise ValueError(str(exc)) from None


def are_alike(one: Any, other: Any) -> bool:
    """Return whether two arguments mean the same.

    A notebook's cell that runs again makes its partitioner, or its function, anew.
    """
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, types.FunctionType):
        return _function_parts(one) == _function_parts(other)
    return bool(one == other) or (hasattr(one, "__dict__") and vars(one) == vars(other))


def _function_parts(function: types.FunctionType) -> tuple[Any, ...]:
    """Return all of a function that tells it from another one."""
    code = function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return (
        code.co_code,
        code.co_consts,
        code.co_names,
        function.__defaults__,
        function.__kwdefaults__,
        cells,
    )
