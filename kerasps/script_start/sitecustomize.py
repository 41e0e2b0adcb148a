"""Makes TensorFlow's start quiet in the script of a launcher, before the script begins.

It removes its directory from the path, and then imports the user's `sitecustomize`, if any.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys


def _leave_path() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    first, _, others = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if first == here:
        # A variable that was set but empty is removed: Python treats both alike.
        del os.environ["PYTHONPATH"]
        if others:
            os.environ["PYTHONPATH"] = others


def _import_users() -> None:
    ours = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError as exc:
        if exc.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, ours)


_leave_path()
# A Python other than the launcher's may lack kerasps. The script then raises the error.
with contextlib.suppress(ImportError):
    importlib.import_module("kerasps")
_import_users()
