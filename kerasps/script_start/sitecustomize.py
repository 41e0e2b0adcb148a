"""Makes TensorFlow's start quiet in the script of a launcher, before the script begins.

It takes its directory off the path, and then imports the `sitecustomize` that the user may have.
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
        # Where the variable was set and empty, so it is again: Python takes it for one that is not.
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
# Under another Python than the launcher's, kerasps may not be there. The script says so.
with contextlib.suppress(ImportError):
    importlib.import_module("kerasps")
_import_users()
