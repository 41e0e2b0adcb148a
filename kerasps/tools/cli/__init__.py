"""The `kerasps` command: `launch`, `run`, `plan`, `serve`, `top`, `trace`, `env`.

Contract: the command starts without TensorFlow's Python packages and without Keras, so that it
shows its help and its errors at once.
"""

from __future__ import annotations

__all__ = [
    "main",
]
