"""Fetches what a stopped worker is to make; run as a process of its own by test_fetching.py.

Prints one JSON line: what was fetched once the worker goes on, and for how long no other thread of
the coordinator could do anything.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import threading
import time

import tensorflow as tf

import kerasps
from kerasps import _compat
from kerasps.runtime.fetching import fetch
from kerasps.training.sessions.session import sending_through

STOPPED_S = 3.0


def beat(beats, is_over):
    while not is_over.wait(0.02):
        beats.append(time.monotonic())


with kerasps.LocalCluster(num_workers=1, num_ps=1) as cluster:
    strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
    pid = cluster.processes["worker", 0].pid
    with tf.device("/job:worker/task:0"):
        made = tf.function(lambda: [tf.ones([3]) + 1.0, tf.constant(["a", "b"])])
        make = made.get_concrete_function()
        fetch(make())  # from here on, nothing is traced
    os.kill(pid, signal.SIGSTOP)
    # A thread of this process might be held up with the others.
    waker = subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {pid}"])
    beats, is_over = [], threading.Event()
    threading.Thread(target=beat, args=[beats, is_over], daemon=True).start()
    began = time.monotonic()
    # As a session does: what it fetches may not be made yet.
    with (
        tf.device("/job:worker/task:0"),
        sending_through(_compat.new_executor(True, in_flight_nodes_limit=2)),
    ):
        numbers, strings = fetch(make())
    waited = time.monotonic() - began
    is_over.set()
    waker.wait()
    report = {
        "fetched": [numbers.tolist(), [string.decode() for string in strings]],
        "waited_s": waited,
        "longest_pause_s": max(after - before for before, after in itertools.pairwise(beats)),
    }
    print("REPORT " + json.dumps(report), flush=True)
