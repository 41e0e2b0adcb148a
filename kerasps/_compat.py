"""Every private name of Keras and TensorFlow that kerasps uses, and why.

This is the only module that reaches into private parts of Keras or TensorFlow. A name is imported
when it is first asked for, so that the modules which need no TensorFlow (the server of a task, the
command line) start fast. A name that has moved fails loudly, with the versions that were tested;
the canary (`test_compat.py`) resolves every one of them. The lists are `kerasps._private_names` and
`kerasps._private_attributes`; what kerasps replaces stands in `kerasps.hooks.PATCHES`.
"""

from __future__ import annotations

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

# The first and the last minor version of each package that the tests ran with. The first ones are
# required (`pyproject.toml`); later ones than the last draw a warning.
TESTED_VERSIONS = {"keras": ((3, 12), (3, 15)), "tensorflow": ((2, 20), (2, 21))}
# Keras 2: as a package of its own, which is `tf.keras` under TF_USE_LEGACY_KERAS, and as a part of
# TensorFlow that is left of it.
KERAS_2 = ("tf_keras", "tensorflow.python.keras")
SUPPORTED_VERSIONS = "Keras 3.12 to 3.15 with TensorFlow 2.20 or 2.21"


def owner_of(handle: object) -> Any:
    """Return the lookup table, or other object, whose handle this is.

    None where it is gone, and for any other tensor. TensorFlow notes in the handle who made it, for
    `tf.saved_model.save`.
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
        module = importlib.import_module(private.module)
        return getattr(module, private.attribute)
    except (ImportError, AttributeError) as exc:
        raise moved(f"{private.module}.{private.attribute}", private.why) from exc


def moved(name: str, why: str) -> ImportError:
    """Return the error of something of Keras or TensorFlow that is not where it was.

    Args:
        name: what is missing, with its module.
        why: what kerasps needs it for.
    """
    return ImportError(
        f"kerasps needs `{name}` ({why}) and did not find it. Expected: {SUPPORTED_VERSIONS}. "
        f"Received: {_installed_versions()}. Install a supported pair of versions."
    )


def check_backend() -> None:
    """Check that Keras runs on TensorFlow. Call before a model, or a strategy, is looked at.

    Raises:
        UnsupportedError: it runs on another backend.
    """
    error = backend_error()
    if error is not None:
        raise error


def backend_error() -> UnsupportedError | None:
    """Return the error of a Keras that runs, or is about to run, on another backend; else None."""
    backend, chosen_by = _backend()
    if backend == "tensorflow":
        return None
    return UnsupportedError(
        f"Keras runs on the backend '{backend}', and kerasps trains on TensorFlow alone. Expected: "
        f"the backend 'tensorflow'. Received: {chosen_by}. Set KERAS_BACKEND=tensorflow in the "
        "environment before Keras is imported, and start the process again."
    )


def _backend() -> tuple[str, str]:
    """Return the backend of Keras, and what has chosen it. Keras need not be imported."""
    in_environment = os.environ.get("KERAS_BACKEND")
    # As Keras finds it.
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
    """Check that it is not a model of Keras 2 that makes a variable.

    Whoever makes it is on the stack: a layer, an optimizer, a metric, or the model.

    Args:
        name: the name of the variable.

    Raises:
        UnsupportedError: it is one of Keras 2.
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
                "makes `tf.keras` Keras 2. What is made outside of `strategy.scope()` stays as it "
                "is."
            )
        frame = frame.f_back


def check_overridden() -> None:
    """Check that each private method that kerasps overrides is still in its base.

    Under another name, the base's would be called in place of ours, without a word.

    Raises:
        ImportError: one is missing; the message names the versions that were tested.
    """
    for owner, attributes in PRIVATE_ATTRIBUTES.items():
        for attribute in attributes:
            if attribute.is_overridden and not hasattr(_class_of(owner), attribute.name):
                raise moved(f"{owner.replace(':', '.')}.{attribute.name}", attribute.why)


def warn_of_untested_versions() -> None:
    """Warn where Keras or TensorFlow is of a version that the tests have not run with."""
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
    """Return the first two numbers of the version that is imported."""
    major, minor, *_ = importlib.import_module(package).__version__.split(".")
    return int(major), int(minor)


def __getattr__(name: str) -> Any:
    if name not in PRIVATE_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = resolve(name)
    globals()[name] = value
    return value


def missing_parameters(name: str) -> list[str]:
    """Return the parameters that kerasps passes to a private function and that it has no more."""
    target = resolve(name)
    if inspect.isclass(target):
        target = target.__init__
    wanted = PRIVATE_NAMES[name].parameters
    if not wanted:
        return []
    known = inspect.signature(target).parameters
    return [parameter for parameter in wanted if parameter not in known]


def missing_attributes(owner: str) -> list[str]:
    """Return what `PRIVATE_ATTRIBUTES[owner]` lists and is missing: attributes and parameters.

    An attribute that only an instance has counts as there when a method of its class, or of a base
    of it, assigns it.
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
    return getattr(importlib.import_module(module), name)


def _assigns(cls: type, attribute: str) -> bool:
    pattern = re.compile(rf"\bself\.{attribute}\b(: [^=]+)? = ")
    return any(
        pattern.search(inspect.getsource(base))
        for base in cls.__mro__
        if base.__module__ != "builtins"
    )


def _installed_versions() -> str:
    # Late: the server of a task does not need it.
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for package in ("keras", "tensorflow"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def import_server_lib() -> types.ModuleType:
    """Import TensorFlow's `server_lib` without the rest of TensorFlow.

    The whole package costs 3 CPU seconds to import and 450 MB; a task's server needs the runtime
    only (0.5 s, 180 MB). The packages `tensorflow` and `tensorflow.python` are entered as bare
    modules, so that their `__init__` does not run. Works in a process that has not imported
    TensorFlow and never will; where TensorFlow is imported already, it is used as it is.
    """
    if "tensorflow" not in sys.modules:
        spec = importlib.util.find_spec("tensorflow")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("TensorFlow is not installed; `pip install kerasps` installs it.")
        root = list(spec.submodule_search_locations)
        for name, path in (("tensorflow", root), ("tensorflow.python", [f"{root[0]}/python"])):
            module = types.ModuleType(name)
            module.__path__ = path
            sys.modules[name] = module
    return importlib.import_module("tensorflow.python.training.server_lib")
