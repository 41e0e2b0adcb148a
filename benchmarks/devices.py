"""Measures the gain from a worker's second device: examples per second with one and with two.

    python benchmarks/devices.py --width 512 --batch-size 256

Without two GPUs it says so, and divides the CPU: that shows the cost of a replica, not its gain.
Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import keras
import numpy as np

import kerasps
from kerasps.cluster.processes.gpus import visible_gpus

STEPS_PER_EXECUTION, BATCHES = 10, 200


def measure(devices: list[str], options: argparse.Namespace) -> float:
    """Return the examples per second of one worker with these devices."""
    with kerasps.LocalCluster(num_workers=1, num_ps=1) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver, worker_devices=devices)
        with strategy.scope():
            layers = [keras.layers.Dense(options.width, "relu") for _ in range(options.layers)]
            model = keras.Sequential(
                [keras.Input((options.width,)), *layers, keras.layers.Dense(1)]
            )
            model.compile("adam", "mse", steps_per_execution=STEPS_PER_EXECUTION)
        x = np.random.default_rng(0).normal(size=(BATCHES * options.batch_size, options.width))
        x = x.astype("float32")
        model.fit(x, x[:, :1], batch_size=options.batch_size, verbose=0)  # builds the graphs
        start = time.perf_counter()
        model.fit(x, x[:, :1], batch_size=options.batch_size, verbose=0)
        return len(x) / (time.perf_counter() - start)


def main() -> None:
    """Measure each number of devices in a separate process, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--devices", nargs="+", help="measure these alone")
    options = parser.parse_args()
    if options.devices:
        print(f"MEASURED {measure(options.devices, options)}")
        return
    gpus = visible_gpus(os.environ)
    kind, env = "GPU", dict(os.environ)
    if len(gpus) < 2:
        kind, env["KERASPS_CPU_DEVICES"] = "CPU", "2"
        print(f"This machine has {len(gpus)} GPUs. What follows is of two parts of one CPU.\n")
    print("| devices | examples/s |\n| --- | --- |")
    for names in ([f"{kind}:0"], [f"{kind}:0", f"{kind}:1"]):
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--devices", *names],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        rate = float(done.stdout.rpartition("MEASURED ")[2])
        print(f"| {', '.join(names)} | {rate:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
