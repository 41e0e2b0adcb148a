"""Doors of wings whose names are imported when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def opened_when_used(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` (PEP 562) of a package that imports each name at its first use.

    Args:
        package: the `__name__` of the package.
        modules: the module within the package that holds each public name.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        # Python finds it there from now on, without a call of this function.
        setattr(sys.modules[package], name, value)
        return value

    return get
