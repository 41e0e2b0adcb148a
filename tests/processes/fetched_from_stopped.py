"""Fetches what a stopped worker is to make; run as a process of its own by test_fetching.py.

Another thread of the coordinator lets the worker go on. If the fetch stopped that thread, nothing
would ever end. Prints one JSON line: what was fetched, and what happened in which order.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import tensorflow as tf
from scenario import local_strategy, print_report

from kerasps import _compat
from kerasps.runtime.fetching import fetch
from kerasps.training.sessions.session import sending_through


def wake():
    """Let the worker go on, after more turns than the fetch takes to begin."""
    for _ in range(100):
        time.sleep(0.02)
    order.append("woken")
    os.kill(pid, signal.SIGCONT)


with local_strategy(1, 1) as (cluster, strategy):
    pid = cluster.processes["worker", 0].pid
    with tf.device("/job:worker/task:0"):
        made = tf.function(lambda: [tf.ones([3]) + 1.0, tf.constant(["a", "b"])])
        make = made.get_concrete_function()
        fetch(make())  # from here on, nothing is traced
    os.kill(pid, signal.SIGSTOP)
    order = []
    waker = threading.Thread(target=wake, daemon=True)
    waker.start()
    # As a session does: what it fetches may not be made yet.
    with (
        tf.device("/job:worker/task:0"),
        sending_through(_compat.new_executor(True, in_flight_nodes_limit=2)),
    ):
        numbers, strings = fetch(make())
    order.append("fetched")
    waker.join()
    report = {
        "fetched": [numbers.tolist(), [string.decode() for string in strings]],
        "order": order,
    }
    print_report(report)
