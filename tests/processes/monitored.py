"""A training with all that looks at it: its status, `kerasps top`, Prometheus and TensorBoard.

Prints a line of JSON with what was seen; `test_monitoring.py` says what is expected.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from scenario import print_report
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import kerasps
from kerasps.tools.monitoring.sockets import directories
from support.process_checks import wait_for

ROWS, STEPS = 500, 40
SEEN: dict = {}


def top(*arguments):
    """What `kerasps top` prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "kerasps", "top", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def metrics_at(address):
    with urllib.request.urlopen(f"http://{address}/metrics") as response:
        text = response.read().decode()
    return {
        "|".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def is_open(address):
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except OSError:
        return False
    return True


def built():
    ids = keras.Input((3,), dtype="int32")
    rows = keras.layers.Embedding(ROWS, 4, name="users")(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile("adam", "mse")
    return model


class Until(keras.callbacks.Callback):
    """Stops the training after the epoch in which a function has ended that runs beside it."""

    def __init__(self, function):
        super().__init__()
        self._function = function
        self.error = None

    def on_train_begin(self, logs=None):
        def run():
            try:
                self._function()
            except BaseException as exc:
                self.error = repr(exc)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def on_epoch_end(self, epoch, logs=None):
        SEEN.setdefault("at_epoch_end", strategy.status().steps)
        if not self._thread.is_alive():
            self.model.stop_training = True


class Failing(keras.callbacks.Callback):
    """Fails after the first epoch."""

    def on_epoch_end(self, epoch, logs=None):
        SEEN["address_in_failing"] = monitor.address
        raise RuntimeError("on purpose")


def look():
    """Look at the training while it runs, and lose a worker."""

    def all_work():
        """A worker may have nothing between two executions, or at the end of an epoch."""
        during = SEEN["during"] = strategy.status().as_dict()
        has_work = [each["executions_in_flight"] or each["waits_for"] for each in during["workers"]]
        return during["state"] == "training" and during["steps"] > STEPS and all(has_work)

    wait_for(all_work)
    SEEN["top"] = top("--json", str(os.getpid()))
    SEEN["top_at_address"] = top("--once", str(monitor.address))
    SEEN["metrics"] = metrics_at(monitor.address)
    with urllib.request.urlopen(f"http://{monitor.address}/status") as response:
        SEEN["status_at_address"] = json.load(response)["pid"]

    def second():
        return strategy.status().workers[1]

    cluster.kill("worker", 1)
    wait_for(lambda: second().state in ("lost", "hangs"))
    SEEN["lost"] = vars(second()) | {"usage": None}
    cluster.restart("worker", 1)
    wait_for(lambda: second().state == "connected")
    steps = second().steps
    wait_for(lambda: second().steps > steps)
    SEEN["back"] = vars(second()) | {"usage": second().usage is not None}


def scalars(folder):
    events = EventAccumulator(str(folder / "cluster"))
    events.Reload()
    return {tag: len(events.Tensors(tag)) for tag in events.Tags()["tensors"]}


directory = TemporaryDirectory()
logs = Path(directory.name)
cluster = kerasps.LocalCluster(num_workers=2, num_ps=2)
strategy = kerasps.ParameterServerStrategy(
    cluster.cluster_resolver, kerasps.FixedShardsPartitioner(2, min_bytes=4000), table_min_bytes=0
)
SEEN["before"] = strategy.status().as_dict()
with strategy.scope():
    model = built()
x = np.random.default_rng(0).integers(0, ROWS, (STEPS * 16, 3)).astype("int32")
y = np.ones(len(x), "float32")
data = {"x": x, "y": y, "batch_size": 16, "verbose": 0}

monitor = kerasps.ClusterMonitor(logs / "first", port=0)
until = Until(look)
model.fit(**data, epochs=10_000, validation_data=(x[:64], y[:64]), callbacks=[monitor, until])
SEEN["error"] = until.error
SEEN["address_after"] = monitor.address
SEEN["after"] = strategy.status().as_dict()
SEEN["iterations"] = int(model.optimizer.iterations.numpy())
SEEN["rows_read"] = SEEN["iterations"] * 16 * 3
SEEN["scalars"] = scalars(logs / "first")

# The same callback again, and a copy of it; scalars by steps.
addresses = []
told = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: addresses.append([c.address for c in (monitor, twin)])
)
twin = copy.deepcopy(monitor)
by_steps = kerasps.ClusterMonitor(logs / "by_steps", update_freq=10)
model.fit(**data, epochs=2, callbacks=[monitor, twin, by_steps, told])
SEEN["addresses"] = addresses
SEEN["second"] = strategy.status().as_dict()
SEEN["iterations_of_both"] = int(model.optimizer.iterations.numpy())
SEEN["scalars_by_steps"] = scalars(logs / "by_steps")
model.evaluate(**data, callbacks=[monitor])
SEEN["address_after_evaluate"] = monitor.address

# A `fit` that fails.
try:
    model.fit(**data, epochs=2, callbacks=[monitor, Failing()])
except RuntimeError as exc:
    SEEN["failed"] = str(exc)
SEEN["open_after_failure"] = is_open(SEEN["address_in_failing"])

# The loss of a ps, and the end of the cluster.
cluster.kill("ps", 1)
try:
    model.fit(**data)
except kerasps.PSLostError as exc:
    SEEN["ps_lost"] = str(exc)[:40]
SEEN["after_ps_loss"] = strategy.status().as_dict()
cluster.close()
SEEN["closed"] = strategy.status().as_dict()
SEEN["sockets"] = [str(path) for folder in directories() for path in folder.glob(f"{os.getpid()}*")]
names = [thread.name for thread in threading.enumerate()]
SEEN["threads"] = [n for n in names if n.startswith(("kerasps-status", "kerasps-monitor"))]
SEEN["pid"] = os.getpid()
print_report(SEEN)
