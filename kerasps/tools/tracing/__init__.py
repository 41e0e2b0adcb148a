"""Traces of a training: pull, compute, push, locks and data of every task, on one clock.

Contract: this wing uses TensorFlow's profiler, which every task's server has. It adds nothing to a
step, and without a trace none of its code runs.
"""

from __future__ import annotations

from kerasps.tools.tracing.callback import Trace

__all__ = ["Trace"]
