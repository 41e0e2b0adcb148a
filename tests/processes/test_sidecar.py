"""A training under `kerasps launch` with an evaluator beside it: plain, under a strategy of its
own, and plain with a table without a vocabulary, from a `tf.train.CheckpointManager`.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import uuid
from pathlib import Path

import keras
import pytest

import kerasps
from support.process_checks import marked_environment, marked_processes, temporary_files, wait_for

SCRIPT = Path(__file__).with_name("sidecar_training.py")


@pytest.mark.parametrize(
    "kind", [pytest.param("plain", marks=pytest.mark.matrix), "strategy", "tables"]
)
def test_the_last_checkpoint_is_evaluated_and_the_best_exported(tmp_path, kind):
    mark = str(uuid.uuid4())
    command = [str(SCRIPT), str(tmp_path), kind]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kerasps",
            "launch",
            "--num-workers=1",
            f"--evaluator={shlex.join(command)}",
            *command,
        ],
        env=marked_environment(
            mark, tmp_path, KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3"
        ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    trained = report(done.stdout, "REPORT ")
    evaluated = report(done.stderr, "[evaluator] REPORT ")
    assert (evaluated["type_of_variables"] == "ParameterServerVariable") == (kind == "strategy")
    assert evaluated["num_rows"] == trained["num_rows"]
    # Earlier ones may have been passed over, the last one never is.
    assert evaluated["evaluations"][-1] == [
        "ckpt-3" if kind == "tables" else "epoch-3.weights.h5",
        12,
        pytest.approx(trained["metrics"], rel=1e-5),
    ]
    assert sorted({name for name, _, _ in evaluated["evaluations"]}) == [
        name for name, _, _ in evaluated["evaluations"]
    ]
    assert evaluated["best"] == min(metrics["loss"] for _, _, metrics in evaluated["evaluations"])

    known = {"DynamicEmbedding": kerasps.layers.DynamicEmbedding}
    exported = keras.models.load_model(tmp_path / "best" / "model.keras", custom_objects=known)
    assert int(exported.optimizer.iterations.numpy()) in {
        iterations for _, iterations, _ in evaluated["evaluations"]
    }
    assert len(list((tmp_path / "logs" / "validation").iterdir())) == 1
    wait_for(lambda: marked_processes(mark) == {}, what="the end of all processes")
    assert temporary_files(tmp_path) == []


def report(output, prefix):
    (line,) = [line for line in output.splitlines() if line.startswith(prefix)]
    return json.loads(line.removeprefix(prefix))
