"""A mapping and a set that compare their keys by identity.

A Keras variable compares element by element, and an optimizer may define any comparison. Neither
can be the key of a `dict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, MutableSet
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class ByIdentity(MutableMapping[_Key, _Value]):
    """A mapping in the order of insertion, which keeps its keys alive: an `id` is never reused."""

    def __init__(self, items: Iterable[tuple[_Key, _Value]] = ()) -> None:
        self._items: dict[int, tuple[_Key, _Value]] = {}
        for key, value in items:
            self[key] = value

    def __getitem__(self, key: _Key) -> _Value:
        return self._items[id(key)][1]

    def __setitem__(self, key: _Key, value: _Value) -> None:
        self._items[id(key)] = key, value

    def __delitem__(self, key: _Key) -> None:
        del self._items[id(key)]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._items

    def __iter__(self) -> Iterator[_Key]:
        return iter([key for key, _ in self._items.values()])

    def __len__(self) -> int:
        return len(self._items)


class IdentitySet(MutableSet[_Key]):
    """A set in the order of insertion, which keeps its members alive."""

    def __init__(self, members: Iterable[_Key] = ()) -> None:
        self._members = {id(member): member for member in members}

    def __contains__(self, member: object) -> bool:
        return id(member) in self._members

    def __iter__(self) -> Iterator[_Key]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def add(self, value: _Key) -> None:
        self._members.setdefault(id(value), value)

    def discard(self, value: _Key) -> None:
        self._members.pop(id(value), None)
