"""Measures the cost of a step compared with plain Keras, by the size of the model.

    python benchmarks/step_size.py
    python benchmarks/step_size.py --widths 256 1024 --wire-dtype bfloat16 --rounds 5

A model is 4 x Dense(width), trained by Adam in batches of 32 with one worker. Each measurement has
a new process and a new cluster, and plain Keras and kerasps take turns. Prints a table in Markdown,
and the line `a + b x MB` that fits best (least squares) the extra time of a step of kerasps over
one of plain Keras. MB are those of the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

WIDTHS = [256, 512, 1024, 1448, 2048]
NUM_LAYERS, BATCH_SIZE = 4, 32


def megabytes(width: int) -> float:
    """Return the megabytes of a model's weights."""
    return NUM_LAYERS * (width + 1) * width * 4 / 1e6


def measure(peer: str, width: int, options: argparse.Namespace) -> None:
    """Train a model and print the milliseconds of a step, of each epoch, as JSON."""
    import contextlib

    import keras
    import numpy as np
    import tensorflow as tf

    import kerasps

    steps = options.steps_per_execution * max(2, int(8 * 2048 / width / 2))
    x = np.random.default_rng(0).normal(size=(steps * BATCH_SIZE, width)).astype("float32")
    with contextlib.ExitStack() as stack:
        if peer == "kerasps":
            cluster = stack.enter_context(kerasps.LocalCluster(1, options.num_ps))
            strategy = kerasps.ParameterServerStrategy(
                cluster.cluster_resolver, wire_dtype=options.wire_dtype
            )
            stack.enter_context(strategy.scope())
        layers = [keras.layers.Dense(width, activation="relu") for _ in range(NUM_LAYERS)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile("adam", "mse", steps_per_execution=options.steps_per_execution)

        def dataset(context: object = None) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices((x, x)).repeat().batch(BATCH_SIZE)

        data = kerasps.DatasetCreator(dataset) if peer == "kerasps" else dataset()
        times = []
        for _ in range(1 + options.epochs):
            began = time.monotonic()
            model.fit(data, steps_per_epoch=steps, verbose=0)
            times.append((time.monotonic() - began) / steps * 1e3)
    print(json.dumps(times[1:]))


def main() -> int:
    """Measure, and print the table and the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--num-ps", type=int, default=1)
    parser.add_argument("--wire-dtype", choices=["bfloat16", "float16"])
    parser.add_argument("--steps-per-execution", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5, help="epochs that are timed, per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        measure(options.measure[0], int(options.measure[1]), options)
        return 0
    cases = [(peer, width) for width in options.widths for peer in ("plain", "kerasps")]
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for peer, width in cases:
            command = [sys.executable, __file__, *sys.argv[1:], "--measure", peer, str(width)]
            done = subprocess.run(
                command,
                env={**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdout=subprocess.PIPE,
                check=True,
            )
            times[peer, width] += json.loads(done.stdout.splitlines()[-1])
            median = statistics.median(times[peer, width])
            print(f"{peer}, width {width}: {median:.2f} ms", file=sys.stderr, flush=True)
    print_table(options.widths, {case: statistics.median(each) for case, each in times.items()})
    return 0


def print_table(widths: list[int], medians: dict[tuple[str, int], float]) -> None:
    """Print a row for each width, and the line."""
    import numpy as np

    print("| width | MB of weights | plain Keras (ms) | kerasps (ms) | more (ms) | line (ms) |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    more = [medians["kerasps", width] - medians["plain", width] for width in widths]
    sizes = [megabytes(width) for width in widths]
    slope, start = np.polyfit(sizes, more, 1)
    for width, size, extra in zip(widths, sizes, more, strict=True):
        both = f"{medians['plain', width]:.2f} | {medians['kerasps', width]:.2f}"
        print(f"| {width} | {size:.1f} | {both} | {extra:.2f} | {start + slope * size:.2f} |")
    print(f"\nMore than plain Keras: {start:.2f} ms + {slope:.2f} ms x MB of weights.")


if __name__ == "__main__":
    sys.exit(main())
