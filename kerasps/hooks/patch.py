"""`Patch`: a function of Keras or TensorFlow that kerasps replaces, and its installation."""

from __future__ import annotations

import contextlib
import functools
import itertools
import numbers
import os
import re
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps import _compat
from kerasps._private_names import FIT, Feature
from kerasps.hooks.in_place import Original, can_be_hooked, defined_function, hook_function
from kerasps.runtime.connected import connected_strategy
from kerasps.variables import current_phase
from kerasps.variables.keras.adoption import is_of_strategy, strategy_of

# The earliest versions that the tests run with (`tox -e oldest`).
KERAS, TENSORFLOW = (
    f"{name} {first[0]}.{first[1]}"
    for name, (first, _) in zip(
        ("Keras", "TensorFlow"), _compat.TESTED_VERSIONS.values(), strict=True
    )
)


@dataclass(frozen=True)
class Patch:
    """A function of Keras or TensorFlow that kerasps replaces.

    Args:
        where: the class or module that holds it: "module:class" or "module", or the name of a
            private module or class in `kerasps._compat`. Versions of Keras name the bases of a
            class differently; the patch is for the one that defines the function.
        name: its name there.
        function: replaces it: takes the original, then the original's arguments. For a property, it
            replaces the getter.
        feature: what does not work without it.
        why: the reason for the patch.
        since: the earliest version that it was tested with.
        owner_name: the name of the owner in the docs, if it is another one.
    """

    where: str
    name: str
    function: Callable[..., Any]
    feature: Feature
    why: str
    since: str
    owner_name: str = ""

    @property
    def owner(self) -> Any:
        """The class or module that defines the function."""
        return _compat.definer(self.where, self.name)

    @property
    def label(self) -> str:
        """The name of the patched function in docs and errors: `Layer._open_name_scope`."""
        where = self.where.replace("tensorflow", "tf").replace(":", ".")
        return f"{self.owner_name or where}.{self.name}"

    @property
    def is_missing(self) -> bool:
        """True if the installed versions have no such function."""
        try:
            return self.owner is None
        except (ImportError, AttributeError):
            return True

    def original(self) -> Any:
        """Return the owner's attribute of that name, which a user may have replaced."""
        return getattr(self.owner, self.name)


_installed: set[tuple[int, str]] = set()


def install(patches: Iterable[Patch], missing: Mapping[Feature, list[str]]) -> None:
    """Install patches, each once. Call once the process has its strategy.

    If something is missing of a feature, patch the functions that users call for it, to refuse it.
    """
    for patch in patches:
        if not patch.is_missing and not (patch.feature in missing and patch.feature.entries):
            function = defined_function(patch.owner, patch.name)
            _install(patch.owner, patch.name, function, patch.function)
    for feature, names in missing.items():
        for entry in feature.entries:
            where, name = entry_of(entry)
            owner = _compat.definer(where, name)
            _install(owner, name, getattr(owner, name), _refusing(feature, names))


def check_patched(patches: Iterable[Patch]) -> dict[Feature, list[str]]:
    """Check that what kerasps needs of Keras and TensorFlow exists. Call before the first patch.

    Warn of what is missing, once for all of it, and return it.

    Raises:
        MissingNameError: something is missing that `fit` needs.
    """
    missing = missing_of(patches)
    if FIT in missing:
        raise _compat.moved(FIT, missing[FIT])
    if missing:
        lost = "; ".join(f"{of.name}: {', '.join(names)}" for of, names in missing.items())
        warnings.warn(
            f"The strategy works without these features, whose private names are missing. {lost}. "
            f"{_compat.versions()} Install a supported pair of versions to use them.",
            UserWarning,
            stacklevel=4,
        )
    return missing


def missing_of(patches: Iterable[Patch]) -> dict[Feature, list[str]]:
    """Return the names that are missing, for each feature that lacks some."""
    missing: dict[Feature, list[str]] = {}
    gone = [(p.feature, f"`{p.label}` ({p.why})") for p in patches if p.is_missing]
    for feature, name in [*_compat.missing(), *gone]:
        missing.setdefault(feature, []).append(name)
    return missing


def entry_of(entry: str) -> tuple[str, str]:
    """Return where a feature's entry is, for `_compat.definer`, and its name there."""
    where, name = re.split(r"[.:](?=\w+$)", entry)
    return where, name


def _refusing(feature: Feature, names: list[str]) -> Callable[..., Any]:
    """Return the hook of a function that users call for a feature that lacks names."""

    def refuse(original: Original, *args: object, **kwargs: object) -> Any:
        things = [arg for arg in tf.nest.flatten((args, kwargs)) if not isinstance(arg, _SETTINGS)]
        if current_phase() is None and things and all(map(_is_without_strategy, things)):
            return original(*args, **kwargs)
        raise _compat.moved(feature, names)

    return refuse


# What an argument is that does not tell whether a call is for the strategy.
_SETTINGS = (str, bytes, numbers.Number, os.PathLike, type(None))


def _is_without_strategy(thing: object) -> bool:
    """Return True for a model, layer, variable or tensor that the strategy has no part in."""
    if isinstance(thing, keras.callbacks.Callback):
        thing = thing.model
    if isinstance(thing, keras.Model):
        return strategy_of(thing) is None
    if isinstance(thing, keras.layers.Layer):
        return thing.built and not any(is_of_strategy(variable) for variable in thing.variables)
    is_tensor = tf.is_tensor(thing) or isinstance(thing, np.ndarray)
    return is_tensor and not is_of_strategy(thing)


def _install(owner: object, name: str, function: object, hook: Callable[..., object]) -> None:
    key = id(owner), name
    if key in _installed:
        return
    _installed.add(key)
    if isinstance(function, types.FunctionType) and can_be_hooked(function):
        hook_function(function, hook)
    else:  # replaced by a user, and no object holds the original
        setattr(owner, name, _replacement(getattr(owner, name), hook))


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

    Neighbours with the same owner, reason, feature and version share a row.
    """
    rows = ["| patched | why | needed for | tested since |", "| --- | --- | --- | --- |"]
    for (_, why, since, feature), group in itertools.groupby(
        patches, key=lambda p: (p.owner_name or p.where, p.why, p.since, p.feature.name)
    ):
        first, *others = group
        names = ", ".join(f"`{name}`" for name in [first.label, *(other.name for other in others)])
        rows.append(f"| {names} | {why} | {feature} | {since} |")
    return "\n".join(rows)
