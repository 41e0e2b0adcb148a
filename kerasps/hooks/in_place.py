"""Hooks a function where it is defined, so that every reference to it calls the hook.

A library may have put a wrapper on `keras.Model.fit` before the first strategy is made, as
`mlflow.keras.autolog()` does. The wrapper holds the original function, and may restore it later. So
a hook replaces the code of that function, not the attribute that names it. A copy of the function
keeps the original code, and the hook calls this copy.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kerasps.runtime.live_objects import live_objects

# A function of Keras or TensorFlow that a hook gets; Keras or TensorFlow defines its signature.
Original = Callable[..., Any]

# The argument by which the new code gets the hook. It is the argument's default, since the globals
# and the number of free variables of a function cannot change.
_HOOK = "_kerasps_hook"


def hook_function(function: types.FunctionType, hook: Callable[..., object]) -> None:
    """Redirect calls of `function` to `hook`, with a copy of `function` as the first argument.

    If `function` is a decorator's wrapper, this also hooks the wrapped function, for code that
    calls it directly. The copy calls a copy of it, so that one call reaches the hook once.
    """
    signature = inspect.signature(function)
    for each, original in _copies(function):
        # The default first: the old code ignores it if another thread calls it now.
        each.__kwdefaults__ = {
            **(each.__kwdefaults__ or {}),
            _HOOK: functools.partial(hook, original),
        }
        each.__code__ = _code_that_calls_hook(each)
        each.__signature__ = signature  # type: ignore[attr-defined]


def can_be_hooked(function: types.FunctionType) -> bool:
    """Return True if one of the templates below can replace the function's code."""
    return all(len(each.__code__.co_freevars) <= 1 for each in chain_of(function))


def defined_function(owner: object, name: str) -> types.FunctionType | None:
    """Return the function that Keras or TensorFlow defines as `owner.name`.

    For a property it is the getter. If a user has replaced the function, this searches all objects
    of the process for it.

    Returns:
        The function, with the library's decorators around it. None if it does not exist.
    """
    for holder in owner.__mro__ if inspect.isclass(owner) else (owner,):
        if name not in vars(holder):
            continue
        current = _function_of(vars(holder)[name])
        if current is not None and _is_defined(current, holder, name):
            return current
        found = [each for each in _functions_called(name) if _is_defined(each, holder, name)]
        # Other modules of the package may have a function with that name.
        found = [each for each in found if _is_of_module(each, holder)] or found
        # The outermost one: a wrapped function is in the chain of its wrapper.
        if found:
            return max(found, key=lambda each: len(list(chain_of(each))))
    return None


def chain_of(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """Yield the function, the function that it wraps, and so on."""
    each: Any = function
    while type(each) is types.FunctionType:
        yield each
        each = vars(each).get("__wrapped__")


def _function_of(attribute: object) -> types.FunctionType | None:
    if isinstance(attribute, property):
        attribute = attribute.fget
    return attribute if type(attribute) is types.FunctionType else None


def _is_defined(function: types.FunctionType, holder: object, name: str) -> bool:
    """Return True if the package of `holder` defines this function as `name` of `holder`.

    A wrapper may have the name and the module of the wrapped function; its code does not.
    """
    folder = _folder_of(holder)
    *_, innermost = chain = list(chain_of(function))
    qualified = f"{holder.__qualname__}.{name}" if inspect.isclass(holder) else name
    return innermost.__code__.co_qualname == qualified and all(
        each.__code__.co_filename.startswith(folder) for each in chain
    )


def _is_of_module(function: types.FunctionType, holder: object) -> bool:
    """Return True if a function is defined in `holder`, or in the module of the class `holder`."""
    module = sys.modules.get(holder.__module__) if inspect.isclass(holder) else holder
    *_, innermost = chain_of(function)
    return innermost.__code__.co_filename == getattr(module, "__file__", None)


def _folder_of(holder: Any) -> str:
    """Return the folder of the package that defines a class or module, with a `/` at its end."""
    module = holder.__module__ if inspect.isclass(holder) else holder.__name__
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None)
    return f"{Path(file).parent}/" if file else "/"


def _functions_called(name: str) -> list[types.FunctionType]:
    """Return all functions of this process with this name."""
    return [
        each
        for each in live_objects()
        if type(each) is types.FunctionType and each.__name__ == name
    ]


def _copies(
    function: types.FunctionType,
) -> Iterator[tuple[types.FunctionType, types.FunctionType]]:
    """Yield each function of the chain with a copy. A wrapper's copy calls the copy of the next."""
    copies: list[tuple[types.FunctionType, types.FunctionType]] = []
    for each in reversed(list(chain_of(function))):
        cells = each.__closure__
        if copies:
            wrapped, copy = copies[-1]
            cells = tuple(
                types.CellType(copy) if cell.cell_contents is wrapped else cell
                for cell in cells or ()
            )
        new = types.FunctionType(
            each.__code__, each.__globals__, each.__name__, each.__defaults__, cells
        )
        new.__kwdefaults__ = each.__kwdefaults__
        functools.update_wrapper(new, each)  # sets `__wrapped__` to the hooked function
        if copies:
            new.__wrapped__ = copies[-1][1]  # type: ignore[attr-defined]
        else:
            del new.__wrapped__  # type: ignore[attr-defined]
        copies.append((each, new))
    return reversed(copies)


# The code that replaces a function's. Python requires the same number of free variables.


def _without_cells(*args: object, _kerasps_hook: Callable[..., object], **kwargs: object) -> Any:
    return _kerasps_hook(*args, **kwargs)


def _with_a_cell(cell: object) -> Callable[..., Any]:
    def calling(*args: object, _kerasps_hook: Callable[..., object], **kwargs: object) -> Any:
        _ = cell
        return _kerasps_hook(*args, **kwargs)

    return calling


def _code_that_calls_hook(function: types.FunctionType) -> types.CodeType:
    templates = (_without_cells, _with_a_cell(None))
    code = templates[len(function.__code__.co_freevars)].__code__
    return code.replace(co_name=function.__name__, co_qualname=function.__qualname__)
