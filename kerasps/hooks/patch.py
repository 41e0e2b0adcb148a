"""`Patch`: a function of Keras or TensorFlow that kerasps replaces, and its installation."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.hooks.in_place import can_be_hooked, defined_function, hook_function
from kerasps.runtime.connected import connected_strategy

# The earliest versions that the tests run with (`tox -e oldest`).
KERAS = "Keras 3.12"
TENSORFLOW = "TensorFlow 2.20"


@dataclass(frozen=True)
class Patch:
    """A function of Keras or TensorFlow that kerasps replaces.

    Args:
        owner: the class or module that holds it.
        name: its name there.
        function: replaces it: takes the original, then the original's arguments. For a property, it
            replaces the getter.
        why: the reason for the patch.
        since: the earliest version that it was tested with.
        owner_name: the name of the owner in the docs, if its name differs between versions.
    """

    owner: Any
    name: str
    function: Callable[..., Any]
    why: str
    since: str
    owner_name: str = ""

    @property
    def label(self) -> str:
        """The name of the patched function in docs and errors: `Layer._open_name_scope`."""
        qualname = self.owner.__qualname__ if inspect.isclass(self.owner) else self.owner.__name__
        return f"{self.owner_name or qualname.rpartition('.')[-1]}.{self.name}"

    def original(self) -> Any:
        """Return the owner's attribute of that name, which a user may have replaced.

        Raises:
            ImportError: the owner has no such function, in the versions that are installed.
        """
        if not hasattr(self.owner, self.name):
            raise _compat.moved(f"{self.owner.__module__}.{self.label}", self.why)
        return getattr(self.owner, self.name)


_installed: set[tuple[int, str]] = set()


def install(patches: Iterable[Patch]) -> None:
    """Install patches, each once. Call once the process has its strategy.

    Args:
        patches: the table.

    Raises:
        ImportError: the installed versions lack a function.
    """
    for patch in patches:
        key = id(patch.owner), patch.name
        if key not in _installed:
            _install(patch)
            _installed.add(key)


def check_patched(patches: Iterable[Patch]) -> None:
    """Check that every function to patch exists. Call before installing the first patch.

    Raises:
        ImportError: a function is missing; the message names the versions that were tested.
    """
    for patch in patches:
        patch.original()


def _install(patch: Patch) -> None:
    function = defined_function(patch.owner, patch.name)
    if function is not None and can_be_hooked(function):
        hook_function(function, patch.function)
    else:  # replaced by a user, and no object holds the original
        setattr(patch.owner, patch.name, _replacement(patch.original(), patch.function))


def _replacement(original: Any, function: Callable[..., object]) -> Any:
    if isinstance(original, property):
        return property(_calling(function, original.fget), doc=original.__doc__)
    return _calling(function, original)


def _calling(function: Callable[..., object], original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def hooked(*args: object, **kwargs: object) -> Any:
        return function(original, *args, **kwargs)

    return hooked


def scope_of_ours() -> contextlib.AbstractContextManager[Any]:
    """Return the strategy's scope, or a context that does nothing if it is current already."""
    strategy = connected_strategy()
    is_current = tf.distribute.get_strategy() is strategy
    return contextlib.nullcontext() if is_current else strategy.scope()


def as_markdown(patches: Iterable[Patch]) -> str:
    """Return the table in Markdown, for the docs.

    Neighbours with the same owner, reason and version share a row.
    """
    rows = ["| patched | why | tested since |", "| --- | --- | --- |"]
    for (_, why, since), group in itertools.groupby(
        patches, key=lambda patch: (patch.label.partition(".")[0], patch.why, patch.since)
    ):
        first, *others = group
        names = ", ".join(f"`{name}`" for name in [first.label, *(other.name for other in others)])
        rows.append(f"| {names} | {why} | {since} |")
    return "\n".join(rows)
