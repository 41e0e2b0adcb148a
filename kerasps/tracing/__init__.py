"""Traces of a training: pull, compute, push, locks and data of every task, on one clock.

Contract: the tasks are asked by TensorFlow's profiler, which their servers have; nothing is added
to a step, and without a trace nothing of this wing runs.
"""

from __future__ import annotations

from kerasps.tracing.callback import Trace

__all__ = ["Trace"]
