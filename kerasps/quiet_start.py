"""Drops the lines that TensorFlow prints to stderr while it starts.

`import kerasps` calls `watch_import`. From then on a filter (`start_filter`) reads stderr during
the first `import tensorflow`, and while TensorFlow first looks for devices. It drops lines that it
knows and passes all others. At other times stderr is unchanged. KERASPS_VERBOSE_STARTUP=1 turns the
filter off; so does a TF_CPP_MIN_LOG_LEVEL of 0.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import types
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec

VERBOSE_STARTUP = "KERASPS_VERBOSE_STARTUP"
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# A user who sets one of these wants to read TensorFlow's messages.
_ASKED_FOR = ("TF_CPP_MAX_VLOG_LEVEL", "TF_CPP_VMODULE", "TF_CPP_VLOG_FILENAME")
# TensorFlow prints warnings and errors, but no INFO messages.
_FROM_WARNINGS_ON = "1"

# Held while a filter reads stderr.
_filtering = threading.Lock()
# True once TensorFlow is imported with INFO messages turned off.
_informs_less = False


def is_quiet() -> bool:
    """Return True unless an environment variable asks for TensorFlow's messages."""
    if os.environ.get(VERBOSE_STARTUP, "") not in ("", "0"):
        return False
    return os.environ.get(_LEVEL) != "0" and not any(os.environ.get(name) for name in _ASKED_FOR)


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Drop, in this context, the lines that TensorFlow prints while it starts.

    If TensorFlow is imported in it, INFO messages stay off afterwards too, unless the user has set
    TF_CPP_MIN_LOG_LEVEL. It does nothing unless `is_quiet()`, and nothing when nested.
    """
    if not is_quiet() or not _filtering.acquire(blocking=False):
        yield
        return
    try:
        with _fewer_messages(), _filtered():
            yield
    finally:
        _filtering.release()


def quiet_server_start() -> contextlib.AbstractContextManager[None]:
    """Return a context that drops TensorFlow's line about the start of its server."""
    if _informs_less or os.environ.get(_LEVEL):
        return contextlib.nullcontext()
    return quiet_start()


def watch_import() -> None:
    """Make the first import of TensorFlow in this process, and its first use, quiet."""
    if _is_imported():
        _watch_first_use()
    elif not any(isinstance(finder, _TensorFlowFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TensorFlowFinder())


@contextlib.contextmanager
def _fewer_messages() -> Iterator[None]:
    before = os.environ.get(_LEVEL)
    if before:
        yield
        return
    # TensorFlow reads it once, when its libraries are loaded. It is reset afterwards, so that
    # programs that this process starts later do not inherit it.
    os.environ[_LEVEL] = _FROM_WARNINGS_ON
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_LEVEL, None)
        else:
            os.environ[_LEVEL] = before


@contextlib.contextmanager
def _filtered() -> Iterator[None]:
    from kerasps.start_filter import StartFilter

    try:
        through = StartFilter()
    except OSError:
        yield
        return
    try:
        yield
    finally:
        through.end()


class _TensorFlowFinder:
    """Finds TensorFlow by the other finders, and makes its loading quiet."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return TensorFlow's spec with another loader; None for other modules."""
        if name != "tensorflow":
            return None
        with contextlib.suppress(ValueError):  # another thread that imports was first
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _QuietLoader(spec.loader))
        return spec


class _QuietLoader:
    """Loads TensorFlow by its loader, without the lines of its start.

    Args:
        loader: TensorFlow's loader.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        """Return the module that TensorFlow's loader creates for a spec."""
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module, and remove this loader from it."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        global _informs_less
        with quiet_start():
            self._loader.exec_module(module)
            _informs_less = os.environ.get(_LEVEL) == _FROM_WARNINGS_ON
        if _is_imported():
            _watch_first_use()


def _watch_first_use() -> None:
    """Make TensorFlow's first search for the devices of this process quiet."""
    from kerasps import _compat

    # TensorFlow prints these lines once in a process.
    with contextlib.suppress(ImportError):  # the strategy raises the error about versions
        if is_quiet():
            # The second one prints only an INFO message for each GPU.
            contexts = type(_compat.eager_context())
            methods = [contexts._initialize_physical_devices, contexts.ensure_initialized]
            for method in methods[:1] if _informs_less else methods:
                _make_first_quiet(contexts, method)


def _make_first_quiet(contexts: type, original: Callable[..., object]) -> None:
    name = original.__name__

    @functools.wraps(original)
    def quiet(*args: object, **kwargs: object) -> object:
        if getattr(contexts, name) is quiet:
            setattr(contexts, name, original)
        with quiet_start():
            return original(*args, **kwargs)

    setattr(contexts, name, quiet)


def _is_imported() -> bool:
    """Return True if all of TensorFlow is imported; a task's server imports a part of it."""
    return hasattr(sys.modules.get("tensorflow"), "__version__")
