"""Runs every example of the documentation on one cluster, in a directory of its own.

python documentation_examples.py DIRECTORY

Prints a line per example. The process connects to one cluster in its life, so the examples that
start one are given the one that is there. Those that speak of a `strategy` and a `model` get those
of the example of `ParameterServerStrategy`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[1]))

import kerasps
from kerasps.evaluator import training_end
from support.documentation import examples

# What other examples go on with: a strategy and a model, and checkpoints.
FIRST = ["ParameterServerStrategy", "TrainingEndMarker"]
# What each worker of a cluster runs by itself, and what such an example goes on with.
IN_EACH_WORKER = {"WorkerDrivenStrategy"}
BEFORE = """
import keras
import numpy as np
import tensorflow as tf

import kerasps


def dataset_fn(context):
    data = np.ones((100, 64), "float32"), np.ones(100, "float32")
    return tf.data.Dataset.from_tensor_slices(data).repeat().batch(10)


"""


def run_in_each_worker(name: str, code: str) -> None:
    script = Path(f"{name}.py")
    script.write_text(BEFORE + code)
    command = ["launch", "--mode", "worker", "--num-workers", "2", "--num-ps", "1", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "kerasps", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def run_all(found: dict[str, list[str]]) -> None:
    given = {"keras": keras, "kerasps": kerasps, "np": np, "tf": tf}
    others = [name for name in found if name not in FIRST]
    for name in [*FIRST, *others]:
        for code in found[name]:
            namespace = dict(given)
            before = time.monotonic()
            if name in IN_EACH_WORKER:
                run_in_each_worker(name, code)
            else:
                exec(compile(code, f"<example of {name}>", "exec"), namespace)
            print(f"ran {name} in {time.monotonic() - before:.1f} s", flush=True)
            if name == "ParameterServerStrategy":
                given |= {key: namespace[key] for key in ("strategy", "model")}


def main() -> None:
    os.chdir(sys.argv[1])
    found = examples()
    with kerasps.LocalCluster(num_workers=2, num_ps=1) as cluster:

        def local_cluster(num_workers, num_ps):
            assert (num_workers, num_ps) == (2, 1)
            return contextlib.nullcontext(cluster)

        kerasps.LocalCluster = local_cluster
        # The training that left its mark is over: none is about to start and remove it.
        training_end.OLD_MARKER_GRACE_S = 0.0
        run_all(found)


if __name__ == "__main__":
    main()
