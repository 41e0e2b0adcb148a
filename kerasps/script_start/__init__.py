"""The directory that `kerasps launch` and `kerasps run` put first on the script's path.

Contract: Python imports its `sitecustomize` before the script. That module makes TensorFlow's start
quiet, whatever the script imports first, and then removes the directory from the path and the
environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_HERE = os.path.dirname(os.path.abspath(__file__))


def with_quiet_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a script with a quiet start of TensorFlow.

    Args:
        environment: the script's environment without the quiet start.
    """
    # An empty path in the variable would stand for the working directory.
    paths = filter(None, (_HERE, environment.get("PYTHONPATH")))
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
