"""Imports the private names of Keras and TensorFlow that kerasps uses.

This is the only module that imports private names of Keras or TensorFlow. It imports a name at its
first use, so that modules which need no TensorFlow (the server of a task, the command line) start
fast. `kerasps._private_names` lists the names, and `kerasps.hooks.PATCHES` the methods that kerasps
replaces, each with the feature that needs it. A name that has moved costs that feature: it raises
an error with the versions that were tested. The canary (`test_compat.py`) looks for every name.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

from kerasps._private_names import PRIVATE_ATTRIBUTES, PRIVATE_NAMES, Feature, Row
from kerasps.errors import MissingNameError, UnsupportedError

# The first and the last minor version of each package that the tests ran with: `tox -e oldest` and
# `tox -e newest`, which fails until a newer version stands here. All other texts follow from these,
# or a test compares them. A version after the last causes a warning.
TESTED_VERSIONS = {"keras": ((3, 12), (3, 15)), "tensorflow": ((2, 20), (2, 21))}
# Keras 2: the package `tf_keras`, which is `tf.keras` under TF_USE_LEGACY_KERAS, and the part that
# TensorFlow still contains.
KERAS_2 = ("tf_keras", "tensorflow.python.keras")
SUPPORTED_VERSIONS = " with ".join(
    f"{name} {first[0]}.{first[1]} to {last[0]}.{last[1]}"
    for name, (first, last) in zip(("Keras", "TensorFlow"), TESTED_VERSIONS.values(), strict=True)
)


def owner_of(handle: object) -> Any:
    """Return the lookup table, or other object, that a handle belongs to.

    None if the object no longer exists, and for other tensors. TensorFlow stores the owner in the
    handle for `tf.saved_model.save`.
    """
    reference = getattr(handle, "_parent_trackable", None)
    return None if reference is None else reference()


def resolve(name: str) -> Any:
    """Import a private name.

    Raises:
        MissingNameError: it is missing; the message names the versions that were tested.
    """
    row = PRIVATE_NAMES[name]
    try:
        return find(row.where)
    except (ImportError, AttributeError) as exc:
        if row.later:
            with contextlib.suppress(ImportError, AttributeError):
                return find(row.later)
        raise moved(row.feature, [label_of(row)]) from exc


def find(where: str) -> Any:
    """Return what is named "module:name", where the name may have dots, or "module".

    Raises:
        ImportError: there is no such module.
        AttributeError: it has no such name.
    """
    module, _, name = where.partition(":")
    return functools.reduce(getattr, filter(None, name.split(".")), importlib.import_module(module))


def base_class(name: str) -> Any:
    """Return a private class to derive from; if it is missing, one whose constructor says so."""
    try:
        return resolve(name)
    except MissingNameError as exc:
        error = exc

    class Missing:
        def __new__(cls, *args: object, **kwargs: object) -> Any:
            raise error

    return Missing


def definer(where: str, name: str) -> Any:
    """Return the first class among the bases of a public class that defines `name` itself.

    Versions of Keras name these bases differently. For a module, return the module.

    Raises:
        AttributeError: none has it.
    """
    owner: Any = resolve(where) if where in PRIVATE_NAMES else find(where)
    for base in owner.__mro__ if inspect.isclass(owner) else (owner,):
        if name in vars(base):
            return base
    raise AttributeError(f"{where} has no attribute {name!r}")


def moved(feature: Feature, names: list[str]) -> MissingNameError:
    """Return the error for names that Keras or TensorFlow no longer has."""
    return MissingNameError(
        f"{feature.name} cannot work: kerasps needs {', '.join(names)} and did not find it. "
        f"{versions()} Install a supported pair of versions."
    )


def versions() -> str:
    """Return the versions that were tested and those that are installed, as errors say it."""
    return f"Expected: {SUPPORTED_VERSIONS}. Received: {_installed_versions()}."


def label_of(row: Row) -> str:
    """Return a row's name with its module, and the reason, as errors name it."""
    where = row.where.replace(":", ".")
    name = where if row.name in PRIVATE_NAMES else f"{where}.{row.name}"
    return f"`{name}` ({row.why})"


def missing() -> list[tuple[Feature, str]]:
    """Return the rows that the installed versions lack, with their features."""
    names = [row for row in PRIVATE_NAMES.values() if is_missing(row)]
    attributes = [row for row in PRIVATE_ATTRIBUTES if missing_attribute(row)]
    return [(row.feature, label_of(row)) for row in [*names, *attributes]]


def check_offered(feature: Feature) -> None:
    """Check that no row of a feature is missing. Call where it is used, if it has no entries.

    Raises:
        MissingNameError: some are; the message names them.
    """
    names = [name for of, name in missing() if of is feature]
    if names:
        raise moved(feature, names)


def is_missing(row: Row) -> bool:
    """Return True if the installed versions lack a private name."""
    try:
        resolve(row.name)
    except MissingNameError:
        return True
    return False


def check_backend() -> None:
    """Check that Keras runs on TensorFlow. Call before using a model or a strategy.

    Raises:
        UnsupportedError: it runs on another backend.
    """
    error = backend_error()
    if error is not None:
        raise error


def backend_error() -> UnsupportedError | None:
    """Return the error if Keras runs, or would run, on another backend; else None."""
    backend, chosen_by = _backend()
    if backend == "tensorflow":
        return None
    return UnsupportedError(
        f"Keras runs on the backend '{backend}', and kerasps trains on TensorFlow alone. Expected: "
        f"the backend 'tensorflow'. Received: {chosen_by}. Set KERAS_BACKEND=tensorflow in the "
        "environment before Keras is imported, and start the process again."
    )


def _backend() -> tuple[str, str]:
    """Return the backend of Keras, and the setting that chose it. Keras need not be imported."""
    in_environment = os.environ.get("KERAS_BACKEND")
    # Keras searches the same places.
    home = os.path.expanduser("~")
    home = home if os.access(home, os.W_OK) else "/tmp"
    folder = os.environ.get("KERAS_HOME") or os.path.join(home, ".keras")
    file = os.path.expanduser(os.path.join(folder, "keras.json"))
    try:
        with open(file, encoding="utf-8") as opened:
            in_file = json.load(opened).get("backend")
    except (OSError, ValueError, AttributeError):
        in_file = None
    config = getattr(sys.modules.get("keras"), "config", None)
    if config is not None:
        backend = str(config.backend())
    else:
        backend = in_environment or in_file or "tensorflow"
    if backend == in_environment:
        return backend, f"KERAS_BACKEND={backend}"
    if backend == in_file:
        return backend, f'"backend": "{backend}" in {file}'
    return backend, f"keras.config.backend() is '{backend}'"


def check_not_keras_2(name: str | None) -> None:
    """Check that no object of Keras 2 is making a variable.

    The maker is on the stack: a layer, an optimizer, a metric, or the model.

    Raises:
        UnsupportedError: the maker is of Keras 2.
    """
    if sys.modules.keys().isdisjoint(KERAS_2):
        return
    frame = inspect.currentframe()
    while frame is not None:
        module = f"{frame.f_globals.get('__name__')}."
        package = next((each for each in KERAS_2 if module.startswith(f"{each}.")), None)
        if package is not None:
            raise UnsupportedError(
                f"Keras 2 makes {f'the variable {name!r}' if name else 'a variable'} under a "
                "strategy of kerasps, which trains models of Keras 3. Expected: models, layers, "
                f"optimizers and metrics of the package `keras`. Received: one of `{package}`. "
                "Use `import keras`, and leave TF_USE_LEGACY_KERAS out of the environment: it "
                "makes `tf.keras` Keras 2. Variables made outside of `strategy.scope()` are not "
                "affected."
            )
        frame = frame.f_back


def warn_of_untested_versions() -> None:
    """Warn if the tests have not run with this version of Keras or TensorFlow."""
    for package, (first, last) in TESTED_VERSIONS.items():
        if not first <= _minor_version(package) <= last:
            warnings.warn(
                f"This version of {package} was not tested with kerasps, which relies on private "
                f"names of it. Expected: {SUPPORTED_VERSIONS}. Received: {_installed_versions()}. "
                "Compare a short training with plain Keras, or install versions that were tested.",
                UserWarning,
                stacklevel=3,
            )


def _minor_version(package: str) -> tuple[int, int]:
    """Return the first two numbers of a package's version. Imports the package."""
    major, minor, *_ = importlib.import_module(package).__version__.split(".")
    return int(major), int(minor)


def __getattr__(name: str) -> Any:
    if name not in PRIVATE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = resolve(name)
    globals()[name] = value
    return value


def missing_parameters(name: str) -> list[str]:
    """Return the parameters that kerasps passes and the private function no longer has."""
    target, wanted = resolve(name), PRIVATE_NAMES[name].parameters
    if not wanted:
        return []
    known = inspect.signature(target.__init__ if inspect.isclass(target) else target).parameters
    return [parameter for parameter in wanted if parameter not in known]


def missing_attribute(row: Row) -> list[str]:
    """Return the attribute of a row, or its parameters, if its class lacks them.

    An attribute of instances counts as present if a method of the class, or of a base, assigns it.
    """
    try:
        cls = find(row.where)
    except (ImportError, AttributeError):
        return [row.name]
    if not hasattr(cls, row.name):
        return [] if _assigns(cls, row.name) else [row.name]
    if not row.parameters:
        return []
    known = inspect.signature(getattr(cls, row.name)).parameters
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):  # a user's wrapper
        return []
    return [f"{row.name}({each})" for each in row.parameters if each not in known]


@functools.cache
def _assigns(cls: type, attribute: str) -> bool:
    """Return True if the code of a class assigns an attribute to an instance."""
    return any(
        instruction.opname == "STORE_ATTR" and instruction.argval == attribute
        for base in cls.__mro__
        for code in _codes(base)
        if attribute in code.co_names
        for instruction in dis.get_instructions(code)
    )


def _codes(cls: type) -> Iterator[types.CodeType]:
    """Yield the code of the methods that a class defines, also where a user has replaced them."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        return
    nested = [_code_of(cls.__module__, file)]
    while nested:
        code = nested.pop()
        if code is not None:
            nested += [each for each in code.co_consts if isinstance(each, types.CodeType)]
            if code.co_qualname.startswith(f"{cls.__qualname__}."):
                yield code


@functools.cache
def _code_of(module: str, file: str) -> types.CodeType | None:
    """Return the code of a module, from Python's cache of compiled modules."""
    return importlib.machinery.SourceFileLoader(module, file).get_code(module)


def _installed_versions() -> str:
    """Return the versions that the packages tell; nightly builds have other names on PyPI."""
    found = []
    for package in ("keras", "tensorflow"):
        try:
            found.append(f"{package} {importlib.import_module(package).__version__}")
        except (ImportError, AttributeError):
            found.append(f"no {package}")
    return ", ".join(found)


def import_server_lib() -> types.ModuleType:
    """Import TensorFlow's `server_lib` without the rest of TensorFlow.

    The whole package takes 3 CPU seconds to import and 450 MB; a task's server needs only the
    runtime (0.5 s, 180 MB). This registers `tensorflow` and `tensorflow.python` as empty modules,
    so that their `__init__` does not run. The process must not import TensorFlow afterwards. If
    TensorFlow is imported already, this uses it unchanged.
    """
    if "tensorflow" not in sys.modules:
        spec = importlib.util.find_spec("tensorflow")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("TensorFlow is not installed; `pip install tensorflow` installs it.")
        root = list(spec.submodule_search_locations)
        for name, path in (("tensorflow", root), ("tensorflow.python", [f"{root[0]}/python"])):
            module = types.ModuleType(name)
            module.__path__ = path
            sys.modules[name] = module
    return importlib.import_module("tensorflow.python.training.server_lib")
