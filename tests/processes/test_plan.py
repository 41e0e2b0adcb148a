"""`kerasps plan`: what it says is what a run does, and it runs nothing."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

from support.process_checks import MARK, marked_environment, marked_processes

SCRIPT = Path(__file__).with_name("planned_training.py")

GROWS = (
    "'growing/embeddings' has no vocabulary, and is not counted: each row takes 64 bytes with its "
    "slots, and up to 64 beside."
)
HEAD = """
import os, time
import keras, numpy as np, tensorflow as tf, kerasps
x, y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")
def make(*layers):
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model
"""


def kerasps(tmp_path, *argv, **variables):
    """The exit code, stdout and stderr of a command, which leaves no process."""
    # Another test of this file may run beside this one.
    env = marked_environment(str(uuid.uuid4()), tmp_path, **variables)
    done = subprocess.run(
        [sys.executable, "-m", "kerasps", *map(str, argv)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert marked_processes(env[MARK]) == {}
    return done.returncode, done.stdout, done.stderr


def plan_of(tmp_path, *argv, **variables):
    code, out, err = kerasps(tmp_path, "plan", "--json", *argv, **variables)
    assert code == 0, err
    return json.loads(out)


def script(tmp_path, body):
    path = tmp_path / "script.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return path


@pytest.mark.parametrize(
    "models",
    [("tables", "chained"), pytest.param(("dense", "many"), marks=pytest.mark.matrix)],
    ids=" and ".join,
)
def test_a_plan_is_what_a_run_does(tmp_path, models):
    report = tmp_path / "report.json"
    numbers = ("--num-workers", 1, "--num-ps", 2)
    code, _, err = kerasps(tmp_path, "launch", *numbers, SCRIPT, report, *models)
    assert code == 0, err
    ran = json.loads(report.read_text())
    for name in models:
        planned = plan_of(tmp_path, *numbers, SCRIPT, tmp_path / "none", name)
        for key, of_run in ran[name].items():
            if key == "grown_bytes":
                grown = sum(ran[name]["num_bytes"]) - sum(ps["num_bytes"] for ps in planned["ps"])
                assert grown == of_run
                assert [*planned["notes"]] == [GROWS] * bool(grown)
                continue
            if key == "num_bytes" and ran[name]["grown_bytes"]:
                continue
            if key == "tables":
                read = [v["path"] for v in planned["variables"] if v["read"] == "rows"]
                assert sorted(read) == of_run, name
                continue
            of_plan = [task[key] for task in planned["ps"]]
            # Of one table the ids are rows of another, which nobody has.
            assert of_plan.count(None) == (name == "chained" and not key.startswith("num_"))
            known = [
                (mine, measured)
                for mine, measured in zip(of_plan, of_run, strict=True)
                if mine is not None
            ]
            assert [mine for mine, _ in known] == pytest.approx(
                [measured for _, measured in known]
            ), f"{name}: {key}"
        assert planned["sample"]["num_batches"] == 20
        assert ("ids follow from rows" in str(planned["sample"]["unknown"])) == (name == "chained")
        assert sum(v["num_bytes"] + v["slot_bytes"] for v in planned["variables"]) <= sum(
            ran[name]["num_bytes"]
        )


def test_a_table_that_no_machine_holds_is_planned(tmp_path):
    path = script(
        tmp_path,
        """
        partitioner = kerasps.MinSizePartitioner()
        strategy = kerasps.ParameterServerStrategy(variable_partitioner=partitioner)
        def dataset_fn(context):
            ids = tf.random.uniform([64, 4], maxval=100, dtype=tf.int64)
            return tf.data.Dataset.from_tensors((ids, tf.ones([64, 1]))).repeat()
        with strategy.scope():
            table = keras.layers.Embedding(10**9, 64)
            model = make(table, keras.layers.Flatten())
            print("rows", table(np.ones([2, 3])).shape)
        model.fit(kerasps.DatasetCreator(dataset_fn), epochs=9, steps_per_epoch=10**6)
        raise AssertionError("trained")
        """,
    )
    planned = plan_of(tmp_path, "--num-ps", 3, path)
    (table,) = [v for v in planned["variables"] if v["read"] == "rows"]
    assert table["num_bytes"] == 10**9 * 64 * 4
    assert table["slot_bytes"] == 2 * table["num_bytes"]
    assert len(table["shards"]) == 3
    assert table["ids_per_step"] == 64 * 4
    assert 80 < table["rows_per_step"] <= 100
    assert planned["advice"][0]["change"] == "more_ps"
    # In kB: TensorFlow and Keras, and no table.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 << 20


def test_the_table_and_a_script_with_a_cluster_of_its_own(tmp_path):
    path = script(
        tmp_path,
        """
        print("of the script")
        with kerasps.LocalCluster(num_workers=3, num_ps=2) as cluster:
            strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
            with strategy.scope():
                model = make(keras.layers.Dense(8))
            try:
                model.fit(x, y)
            except Exception:
                print("handled")
            finally:
                print("cleaned up")
        raise AssertionError("went on")
        """,
    )
    code, out, err = kerasps(tmp_path, "plan", path, KERASPS_NUM_WORKERS="5")
    assert code == 0, err
    assert out.startswith("of the script\ncleaned up\n")
    for text in (
        "fit of model 'sequential', Adam, on 3 workers and 2 ps",
        "sequential/dense/kernel",
        "The script names a cluster of 3 workers and 2 ps, and not the 5 and 1",
        "The workers read 2 batches for each pass",
        "- Take 1 ps: 1 of 2 hold no variable.",
    ):
        assert text in out


STRATEGY = "strategy = kerasps.ParameterServerStrategy()\nwith strategy.scope(): model = make()\n"


@pytest.mark.parametrize(
    ("body", "says", "last"),
    [
        ("def f(): raise ValueError('of the script')\nf()", "ValueError: of the script", "failed"),
        pytest.param(
            "import sys; sys.exit('no data')", "", "ended with exit code", marks=pytest.mark.matrix
        ),
        pytest.param(
            *("make().fit(x, y)", "which no ParameterServerStrategy trains"),
            "Make it in the scope.",
            marks=pytest.mark.matrix,
        ),
        (STRATEGY, "Received: such a strategy, and no such call", "ended and ran no step"),
        (
            "try: kerasps.WorkerDrivenStrategy()\nexcept Exception: pass",
            "The script makes a WorkerDrivenStrategy",
            "Make the former",
        ),
        pytest.param(
            f"{STRATEGY}tf.distribute.coordinator.ClusterCoordinator(strategy)",
            "has a custom training loop",
            "calls `fit`",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_a_script_without_a_plan(tmp_path, body, says, last):
    code, out, err = kerasps(tmp_path, "plan", "--json", script(tmp_path, body))
    assert code == 1
    assert out == ""
    assert says in err
    (line,) = [line for line in err.splitlines() if line.startswith("kerasps plan: error: ")]
    assert last in line
    assert "kerasps/tools/plan" not in err


def test_what_is_done_before_the_first_step(tmp_path):
    path = script(
        tmp_path,
        """
        model = make(keras.layers.Embedding(50_000, 32), keras.layers.Flatten())
        strategy = kerasps.ParameterServerStrategy(update_mode="sync")
        with strategy.scope():  # the model is adopted
            model.compile("adam", "mse")
        print(model(np.ones((2, 4))).shape)
        model.save_weights("w.weights.h5")
        assert not os.path.exists("w.weights.h5")
        model.set_weights(model.get_weights())
        model.summary()
        print(strategy.workers(), strategy.placement())
        model.evaluate(np.full((64, 4), 60_000), y)
        """,
    )
    code, out, err = kerasps(tmp_path, "plan", path)
    assert code == 0, err
    assert "evaluate of model 'sequential'" in out
    assert "model 'sequential' is not saved to w.weights.h5" in err
    assert "A step with batch 0 would fail: Ids out of range: " in out
    assert "has 50000 rows" in out
    assert "Nothing to change, as far as is known." in out


def test_a_table_of_more_rows_than_32_bits_count_is_read_by_rows(tmp_path):
    """TensorFlow has no gradient of a look-up in so many rows, of whatever name the variable is."""
    rows = 2**31 + 7
    path = script(
        tmp_path,
        f"""
        class Table(keras.layers.Layer):
            def build(self, shape):
                self.table = self.add_weight(shape=({rows}, 1), initializer="zeros")
            def call(self, x):
                ids = tf.cast(x, tf.int64)
                return tf.squeeze(tf.nn.embedding_lookup(self.table, ids), -1)
        two = kerasps.FixedShardsPartitioner(2, min_bytes=2**30)
        with kerasps.ParameterServerStrategy(variable_partitioner=two).scope():
            model = make(keras.layers.Embedding({rows}, 1), keras.layers.Flatten(), Table())
        model.fit(x, y, batch_size=8)
        """,
    )
    plan = plan_of(tmp_path, "--num-ps", 2, path)
    read = {
        v["path"].rpartition("/")[2]: v["read"] for v in plan["variables"] if v["shape"][0] == rows
    }
    assert len(read) == 2
    assert set(read.values()) == {"rows"}
