"""Checks of arguments: counts, time limits, paths, choices, and equality of two arguments."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import types
from collections.abc import Sequence
from pathlib import Path
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
    """Return `value` as an `int`, or raise an error that names the allowed counts.

    Raises:
        TypeError: `value` is not an integer.
        ValueError: `value` is less than `least`.
    """
    expected = expected or f"a whole number of at least {least}"
    message = f"{problem}. Expected: {expected}. Received: {received or repr(value)}. {advice}"
    # Python takes True for the index 1. Users who pass it have mostly mixed up two arguments.
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
    value: object,
    *,
    received: str | None = None,
    advice: str = "Give a number like 60.",
) -> float:
    """Return `value` as a `float`, or raise an error that names the allowed time limits.

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


def time_limit(
    limit: float | None, *, variable: str, default: float, argument: str = "timeout_s"
) -> float:
    """Return a time limit in seconds: an argument, else an environment variable, else a default."""
    source, given, value = f"Argument `{argument}`", f"{argument}={limit!r}", limit
    if limit is None:
        text = os.environ.get(variable)
        if not text:
            return default
        source, given = f"Environment variable {variable}", repr(text)
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
        # One type of error for both sources: an environment variable is always text.
        raise ValueError(str(exc)) from None


def path(argument: str, value: object, *, advice: str = "Give one like 'run'.") -> Path:
    """Return an argument that names a file or a directory as a `Path`.

    Raises:
        TypeError: `value` is neither.
        ValueError: it is empty.
    """
    message = (
        f"Argument `{argument}` names no path. Expected: a path, as a string or an `os.PathLike`. "
        f"Received: {argument}={value!r}. {advice}"
    )
    if not isinstance(value, (str, os.PathLike)) or isinstance(os.fspath(value), bytes):
        raise TypeError(message)
    if not os.fspath(value):
        raise ValueError(message)
    return Path(value)


def choice(argument: str, value: object, choices: Sequence[str]) -> None:
    """Check an argument that is one of a few names."""
    if value not in choices:
        expected = " or ".join(repr(name) for name in choices)
        raise ValueError(
            f"Argument `{argument}` is not one of its values. Expected: {expected}. Received: "
            f"{argument}={value!r}. Give one of these."
        )


def are_alike(one: object, other: object) -> bool:
    """Return True if two arguments mean the same.

    A notebook's cell that runs again makes a new partitioner, or a new function.
    """
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, types.FunctionType) and isinstance(other, types.FunctionType):
        return _function_parts(one) == _function_parts(other)
    return bool(one == other) or (hasattr(one, "__dict__") and vars(one) == vars(other))


def _function_parts(function: types.FunctionType) -> tuple[Any, ...]:
    """Return the parts of a function that distinguish it from another one."""
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
