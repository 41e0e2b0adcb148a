"""What tests expect of a version of Keras."""

from __future__ import annotations

import keras
import pytest

# The major and the minor version.
KERAS = tuple(map(int, keras.__version__.split(".")[:2]))


def warned_since(version, message):
    """A mark of a test in which Keras warns since `version`; before, a warning is an error."""
    if version <= KERAS:
        return pytest.mark.filterwarnings(f"ignore:{message}")
    return lambda test: test
