"""Members of other strategies that a strategy without a coordinator does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from kerasps.errors import UnsupportedError


class NotOffered:
    """A member of other strategies that this one does not have: its use raises `UnsupportedError`.

    Args:
        message: the message of the error. `{given}` in it stands for the name of the first argument
            of the call.
        is_method: True to raise at the call, False to raise at the access of the attribute.
    """

    def __init__(self, message: str, *, is_method: bool = True) -> None:
        self._message = message
        self._is_method = is_method

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., NoReturn]:
        if instance is not None and not self._is_method:
            raise UnsupportedError(self._message)
        return self

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        given = next(iter((*args, *kwargs.values())), None)
        name = repr(getattr(given, "__name__", given))
        raise UnsupportedError(self._message.replace("{given}", name))
