"""The runner of Keras's own tests, as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

SUITE = Path(__file__).resolve().parents[1] / "keras_suite"


def load_runner():
    """Return `tests/keras_suite/run.py`, a script, as a module."""
    name = "keras_suite_run"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SUITE / "run.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
