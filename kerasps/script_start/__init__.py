"""The directory that `kerasps launch` and `kerasps run` put first on the script's path.

Contract: Python imports its `sitecustomize` before the script. That makes TensorFlow's start quiet,
whatever the script imports first, and leaves no trace: neither on the path nor in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_HERE = os.path.dirname(os.path.abspath(__file__))


def with_quiet_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a script in which TensorFlow's start is quiet.

    Args:
        environment: the environment that the script would have.
    """
    paths = [_HERE, environment["PYTHONPATH"]] if "PYTHONPATH" in environment else [_HERE]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
