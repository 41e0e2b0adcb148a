"""Imports the private names of Keras and TensorFlow that kerasps uses.

This is the only module that imports private names of Keras or TensorFlow. It imports a name at its
first use, so that modules which need no TensorFlow (the server of a task, the command line) start
fast. A name that has moved raises an error with the versions that were tested; the canary
(`test_compat.py`) resolves every name. `kerasps._private_names` and `kerasps._private_attributes`
list the names, and `kerasps.hooks.PATCHES` the methods that kerasps replaces.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import types
import warnings
from typing import Any

from kerasps._private_attributes import PRIVATE_ATTRIBUTES
from kerasps._private_names import PRIVATE_NAMES
from kerasps.errors import UnsupportedError

# The first and the last minor version of each package that the tests ran with. `pyproject.toml`
# requires the first; a version after the last causes a warning.
TESTED_VERSIONS = {"keras": ((3, 12), (3, 15)), "tensorflow": ((2, 20), (2, 21))}
# Keras 2: the package `tf_keras`, which is `tf.keras` under TF_USE_LEGACY_KERAS, and the part that
# TensorFlow still contains.
KERAS_2 = ("tf_keras", "tensorflow.python.keras")
SUPPORTED_VERSIONS = "Keras 3.12 to 3.15 with TensorFlow 2.20 or 2.21"


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
        ImportError: it is missing; the message names the versions that were tested.
    """
    private = PRIVATE_NAMES[name]
    try:
        return _attribute(private.module, private.attribute)
    except (ImportError, AttributeError) as exc:
        if private.later_module:
            with contextlib.suppress(ImportError, AttributeError):
                return _attribute(private.later_module, private.attribute)
        raise moved(f"{private.module}.{private.attribute}", private.why) from exc


def trainer_that_defines(method: str) -> Any:
    """Return the class among the bases of `keras.Model` that defines a method of the training.

    Keras has two, which have other names in 3.16: one for all backends, with `compile`, and one for
    TensorFlow, with `make_train_function`.

    Raises:
        ImportError: no base defines it; the message names the versions that were tested.
    """
    return _definer(importlib.import_module("keras").Model, method)


def moved(name: str, why: str) -> ImportError:
    """Return the error for a name that Keras or TensorFlow no longer has.

    Args:
        name: the missing name, with its module.
        why: what kerasps needs it for.
    """
    return ImportError(
        f"kerasps needs `{name}` ({why}) and did not find it. Expected: {SUPPORTED_VERSIONS}. "
        f"Received: {_installed_versions()}. Install a supported pair of versions."
    )


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

    Args:
        name: the name of the variable.

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


def check_overridden() -> None:
    """Check that each private method that kerasps overrides still exists in its base class.

    If it was renamed, Keras or TensorFlow would call the base's method and skip ours silently.

    Raises:
        ImportError: one is missing; the message names the versions that were tested.
    """
    for owner, attributes in PRIVATE_ATTRIBUTES.items():
        for attribute in attributes:
            if attribute.is_overridden and not hasattr(_class_of(owner), attribute.name):
                raise moved(f"{owner.replace(':', '.')}.{attribute.name}", attribute.why)


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
    target = resolve(name)
    if inspect.isclass(target):
        target = target.__init__
    wanted = PRIVATE_NAMES[name].parameters
    if not wanted:
        return []
    known = inspect.signature(target).parameters
    return [parameter for parameter in wanted if parameter not in known]


def missing_attributes(owner: str) -> list[str]:
    """Return the attributes and parameters that `PRIVATE_ATTRIBUTES` lists and `owner` lacks.

    An attribute of instances counts as present if a method of the class, or of a base, assigns it.
    """
    cls = _class_of(owner)
    missing = []
    for attribute in PRIVATE_ATTRIBUTES[owner]:
        if not hasattr(cls, attribute.name) and not _assigns(cls, attribute.name):
            missing.append(attribute.name)
        elif attribute.parameters:
            known = inspect.signature(getattr(cls, attribute.name)).parameters
            missing += [
                f"{attribute.name}({parameter})"
                for parameter in attribute.parameters
                if parameter not in known
            ]
    return missing


def _class_of(owner: str) -> Any:
    module, _, name = owner.partition(":")
    name, _, method = name.partition("/")
    cls = _attribute(module, name)
    return _definer(cls, method) if method else cls


def _attribute(module: str, attribute: str) -> Any:
    return getattr(importlib.import_module(module), attribute)


def _definer(cls: type, method: str) -> type:
    """Return the first class in the order of resolution that defines a method itself."""
    for base in cls.__mro__:
        if method in vars(base):
            return base
    raise moved(f"{cls.__module__}.{cls.__qualname__}.{method}", "`fit` and its siblings")


def _assigns(cls: type, attribute: str) -> bool:
    pattern = re.compile(rf"\bself\.{attribute}\b(: [^=]+)? = ")
    return any(
        pattern.search(inspect.getsource(base))
        for base in cls.__mro__
        if base.__module__ != "builtins"
    )


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
