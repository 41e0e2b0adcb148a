"""Trains for a moment and waits for a line on stdin; run by test_listening.py.

With the argument `foreign` it makes a cluster of its own and first puts another function into the
place where TensorFlow's libraries keep `bind`, as a tracer would; then it says that all may reach
its port.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import warnings

import keras
import numpy as np
from scenario import print_report

import kerasps
from kerasps.cluster.serving import bind
from kerasps.runtime.linkage import find_slots
from support.process_checks import listening_addresses


@bind._FUNCTION
def pass_on(*arguments):
    return bind._real_bind(*arguments)


@contextlib.contextmanager
def foreign_bind():
    slots = find_slots("bind", bind.LIBRARIES)
    before = [slot.read() for slot in slots]
    for slot in slots:
        slot.write(ctypes.cast(pass_on, ctypes.c_void_p).value)
    yield
    for slot, value in zip(slots, before, strict=True):
        slot.write(value)


with contextlib.ExitStack() as stack:
    messages, refused, listened = [], "", []
    if "foreign" in sys.argv:
        cluster = stack.enter_context(kerasps.LocalCluster(1, 1))
        with foreign_bind(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                kerasps.ParameterServerStrategy(cluster.cluster_resolver)
            except kerasps.TaskStartError as exc:
                refused, listened = str(exc), sorted(listening_addresses(os.getpid()))
            os.environ["KERASPS_BIND"] = "0.0.0.0"
            strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
        messages = [str(warning.message) for warning in caught]
    else:
        strategy = kerasps.ParameterServerStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((32, 2)), np.ones((32, 1)), batch_size=4, verbose=0)
    report = {
        "steps": int(model.optimizer.iterations),
        "listens": sorted(listening_addresses(os.getpid())),
        "warnings": messages,
        "refused": refused,
        "listened": listened,
    }
    print_report(report)
    sys.stdin.readline()
