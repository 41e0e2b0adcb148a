"""Workers that drive their own steps, as far as it goes without a cluster."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
import re
import socket

import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.cluster.local.resolver import LocalClusterResolver
from kerasps.cluster.server import check_can_serve
from kerasps.cluster.serving.renewal import AfterTheEnd
from kerasps.step.tracing.state import Header
from kerasps.tools.cli.main import main
from kerasps.variables.placing.placement import SMALL_BYTES, PlacementLedger
from kerasps.worker_driven import estimators
from kerasps.worker_driven.host import _chief_text, _is_chief, _share_of
from kerasps.worker_driven.run import Run
from kerasps.worker_driven.shared_variables import _LastingLedger
from support.documentation import CHECKOUT

JOBS = {"worker": ["127.0.0.1:3", "127.0.0.1:5"], "ps": ["127.0.0.1:4"]}


def tf_config(task_type, index=0, **jobs):
    return json.dumps({"cluster": {**JOBS, **jobs}, "task": {"type": task_type, "index": index}})


def test_a_cluster_needs_no_chief_where_workers_drive_themselves():
    description = read_tf_config(tf_config("worker", 1), needs_chief=False)
    assert description.address == "127.0.0.1:5"
    with pytest.raises(kerasps.ClusterConfigError, match="has no chief"):
        read_tf_config(tf_config("worker", 1))
    with pytest.raises(kerasps.ClusterConfigError, match="has several chiefs"):
        read_tf_config(tf_config("worker", chief=["a:1", "a:2"]), needs_chief=False)


@pytest.mark.parametrize(
    ("task", "chief", "expected"),
    [
        (("worker", 0), [], True),
        (("worker", 1), [], False),
        (("chief", 0), ["127.0.0.1:2"], True),
        (("worker", 0), ["127.0.0.1:2"], False),
    ],
)
def test_worker_0_is_the_chief_unless_there_is_one(task, chief, expected):
    jobs = {"chief": chief} if chief else {}
    cluster = read_tf_config(tf_config(*task, **jobs), needs_chief=False)
    assert _is_chief(cluster) == expected
    name = "chief 0 at 127.0.0.1:2" if chief else "worker 0 at 127.0.0.1:3"
    assert _chief_text(cluster) == name


@pytest.mark.parametrize(
    ("task_type", "fix"), [("ps", "Run `kerasps serve` in this ps"), ("evaluator", "no strategy")]
)
def test_who_drives_no_steps_is_told_so(monkeypatch, task_type, fix):
    monkeypatch.setenv("TF_CONFIG", tf_config(task_type))
    with pytest.raises(kerasps.ClusterConfigError, match="is created only by workers") as caught:
        kerasps.WorkerDrivenStrategy()
    assert f"Received: task type '{task_type}', index 0." in str(caught.value)
    assert fix in str(caught.value)


def test_a_resolver_is_read_as_tf_config_is():
    spec = tf.train.ClusterSpec({"worker": ["127.0.0.1:3"]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, "worker", 0)
    resolver.task_type, resolver.task_id = "worker", 0
    with pytest.raises(kerasps.ClusterConfigError, match="has no ps"):
        kerasps.WorkerDrivenStrategy(resolver)


def test_the_workers_of_a_local_cluster_are_servers():
    resolver = LocalClusterResolver.__new__(LocalClusterResolver)
    with pytest.raises(kerasps.ClusterConfigError, match="are servers, and drive no steps"):
        kerasps.WorkerDrivenStrategy(resolver)


def test_ps_that_do_not_answer_are_named():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        ps = f"127.0.0.1:{holder.getsockname()[1]}"
        spec = tf.train.ClusterSpec({**JOBS, "ps": [ps]})
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, "worker", 1)
        resolver.task_type, resolver.task_id = "worker", 1
        with pytest.raises(kerasps.TaskUnreachableError, match=f"ps 0 at {ps}") as caught:
            kerasps.WorkerDrivenStrategy(resolver, connect_timeout=0.2)
        # Nobody waits for another worker.
        assert "worker" not in str(caught.value)


def test_a_worker_that_drives_itself_is_not_served():
    check_can_serve(ClusterDescription(JOBS, "ps", 0))
    check_can_serve(ClusterDescription({**JOBS, "chief": ("a:1",)}, "worker", 0))
    with pytest.raises(kerasps.ClusterConfigError, match="each worker drives its own steps"):
        check_can_serve(ClusterDescription(JOBS, "worker", 0))


def test_seeds_are_moved_and_nothing_else():
    header = Header(7, [[1, 100], [2**31 - 2, 200]])
    moved = np.frombuffer(header.with_other_seeds(5).to_bytes(), "<i8")
    assert moved.tolist() == [7, 6, 100, 4, 200]


@pytest.mark.parametrize("ledger", [PlacementLedger, _LastingLedger])
def test_what_python_has_collected_does_not_move_the_next_variable(ledger):
    account = ledger(2)
    for number in range(3):
        variable = _Stored(number % 2, SMALL_BYTES)
        account.add(variable, is_placed=True)
        del variable
    # All are gone; by what is left the first ps is the lightest, by what was made the second.
    assert account.place(SMALL_BYTES + 1) == (1 if ledger is _LastingLedger else 0)


class _Stored:
    """What a ledger looks at."""

    name, dtype = "stored", tf.float32

    def __init__(self, ps, size):
        self.device, self.shape = f"/job:ps/replica:0/task:{ps}", (size,)


def test_the_same_program_makes_the_same_names():
    def names():
        run = Run("a run", is_chief=False, chief="worker 0", timeout=None)
        kinds = [("kernel", ("float32", (2,))), ("kernel", ("float32", (2,)))]
        kinds += [("kernel", ("float32", (3,))), ("bias", ("float32", (2,)))]
        return [run.name_of(*kind) for kind in kinds]

    assert names() == names()
    assert len(set(names())) == 4
    assert all(name.startswith("kerasps/a run/") for name in names())


def test_a_worker_is_given_its_share_whoever_asks():
    seen = []

    def dataset_fn(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id))
        return tf.data.Dataset.range(1)

    _share_of(kerasps.DatasetCreator(dataset_fn), 3, 2)(tf.distribute.InputContext(1, 0, 1))
    assert seen == [(3, 2)]


def test_a_ps_ends_when_all_is_over_and_nobody_is_connected():
    over = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        end = AfterTheEnd(address, lambda: bool(over), linger_s=1e9)
        assert not end.is_over()
        with socket.create_connection(server.getsockname()) as client:
            connection, _ = server.accept()
            over.append(True)
            assert not end.is_over()
            client.close()
            connection.close()
        assert end.is_over()
        assert AfterTheEnd(address, lambda: True, linger_s=0.0).is_over()


def dataset():
    return tf.data.Dataset.range(1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: kerasps.TrainSpec(3), TypeError, "`input_fn` must be a function"),
        (lambda: kerasps.EvalSpec(3), TypeError, "`input_fn` must be a function"),
        (lambda: kerasps.TrainSpec(dataset, max_steps=0), ValueError, "`max_steps` is not a count"),
        (lambda: kerasps.EvalSpec(dataset, steps=1.5), TypeError, "`steps` is not a count"),
        (
            lambda: kerasps.EvalSpec(dataset, throttle_secs=-1),
            ValueError,
            "`throttle_secs` is not a time",
        ),
        (
            lambda: kerasps.RunConfig("run", save_checkpoints_secs=0),
            ValueError,
            "`save_checkpoints_secs` is not a time",
        ),
        (
            lambda: kerasps.RunConfig("run", keep_checkpoint_max=-1),
            ValueError,
            "`keep_checkpoint_max` is not a count",
        ),
        (lambda: kerasps.RunConfig(None), TypeError, "`model_dir` names no path"),
        (lambda: kerasps.RunConfig(""), ValueError, "`model_dir` names no path"),
        (lambda: kerasps.RunConfig("run", random_seed="x"), TypeError, "`random_seed` is not a"),
        (
            lambda: kerasps.RunConfig("run", save_checkpoints_secs=None),
            TypeError,
            "`save_checkpoints_secs` is not a time",
        ),
        (
            lambda: kerasps.TrainSpec(lambda features, mode: dataset()),
            TypeError,
            "`input_fn` is a function that needs arguments which it will not get.*input_context",
        ),
        (
            lambda: kerasps.TrainSpec(dataset, callbacks=keras.callbacks.Callback()),
            TypeError,
            "`callbacks` is not a list of `keras.callbacks.Callback`",
        ),
        (
            lambda: kerasps.EvalSpec(dataset, exporters=[keras.callbacks.ModelCheckpoint]),
            TypeError,
            "`exporters` is not a list of `kerasps.SidecarEvaluatorModelExport`",
        ),
        (lambda: kerasps.EvalSpec(dataset, 100, "eval"), TypeError, "`exporters` is not a list"),
        (
            lambda: kerasps.RunConfig("run", strategy=tf.distribute.get_strategy()),
            TypeError,
            "`strategy` must be a function that makes the strategy",
        ),
    ],
)
def test_a_spec_says_what_is_wrong_with_it(make, error, message):
    with pytest.raises(error, match=f"Argument {message}.*Received: "):
        make()


def test_what_estimators_take_for_nothing_is_nothing():
    spec = kerasps.EvalSpec(dataset, exporters=None, callbacks=None)
    assert (spec.exporters, kerasps.TrainSpec(dataset, callbacks=None).callbacks) == (None, None)
    config = kerasps.RunConfig("run", save_checkpoints_steps=5, save_checkpoints_secs=None)
    assert config.save_checkpoints_secs is None
    assert kerasps.RunConfig("run", keep_checkpoint_max=None).keep_checkpoint_max is None


@pytest.mark.parametrize(
    ("make", "argument", "advice"),
    [
        (lambda **k: kerasps.TrainSpec(dataset, **k), "hooks", "`keras.callbacks.Callback`"),
        (lambda **k: kerasps.EvalSpec(dataset, **k), "name", "another `log_dir`"),
        (lambda **k: kerasps.RunConfig("run", **k), "save_summary_steps", "TensorBoard"),
        (lambda **k: kerasps.RunConfig("run", **k), "tf_random_seed", "Call it `random_seed`"),
        (lambda **k: kerasps.RunConfig("run", **k), "session_config", "gone, with sessions"),
        (lambda **k: kerasps.train_and_evaluate(**k), "estimator", "as `model_fn`"),
    ],
)
def test_an_argument_of_estimators_says_where_it_went(make, argument, advice):
    with pytest.raises(
        TypeError, match=rf"Argument `{argument}` of TensorFlow's est.*Received: {argument}=\[1\]"
    ) as caught:
        make(**{argument: [1]})
    assert advice in str(caught.value)
    assert "docs/worker_driven.md" in str(caught.value)


def test_the_table_of_estimators_has_every_argument_that_is_named():
    text = (CHECKOUT / "docs" / "worker_driven.md").read_text()
    table = text[text.index("| Estimator | here |") :].partition("\n\n")[0]
    for moved in (
        estimators.OF_TRAIN_SPEC,
        estimators.OF_EVAL_SPEC,
        estimators.OF_RUN_CONFIG,
        estimators.OF_TRAIN_AND_EVALUATE,
    ):
        assert [name for name in moved if not re.search(rf"\b{name}\b", table)] == []


def test_a_spec_is_copied_and_shows_its_arguments():
    spec = kerasps.TrainSpec(dataset, max_steps=3)
    assert list(inspect.signature(kerasps.TrainSpec).parameters) == [
        "input_fn",
        "max_steps",
        "callbacks",
    ]
    assert dataclasses.replace(spec, max_steps=4) == kerasps.TrainSpec(dataset, max_steps=4)
    assert pickle.loads(pickle.dumps(spec)) == spec


def compiled():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def uncompiled():
    return keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])


def beside_checkpoints():
    export = kerasps.SidecarEvaluatorModelExport("run/model.keras")
    return kerasps.EvalSpec(dataset, exporters=[export])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_fn": compiled}, None, ""),
        ({"model_fn": lambda features, labels, mode: None}, TypeError, "needs features, labels"),
        ({"model_fn": 3}, TypeError, "`model_fn` is not a function that returns a model"),
        ({"model_fn": lambda: 3}, TypeError, "The `model_fn` returned no model.*Received: 3"),
        ({"model_fn": uncompiled}, ValueError, "`model_fn` returned is not compiled"),
        ({"train_spec": kerasps.EvalSpec(dataset)}, TypeError, "is not a `kerasps.TrainSpec`"),
        ({"eval_spec": None}, TypeError, "`eval_spec` is not a `kerasps.EvalSpec`"),
        ({"config": "run"}, TypeError, "`config` is not a `kerasps.RunConfig`"),
        ({"eval_spec": kerasps.EvalSpec(lambda: 3)}, TypeError, "`input_fn` returned no dataset"),
        (
            {"eval_spec": beside_checkpoints()},
            ValueError,
            r"outside of `RunConfig\(model_dir\)`.*such as 'run/best/model.keras'",
        ),
    ],
)
def test_train_and_evaluate_says_what_is_wrong_with_its_arguments(
    monkeypatch, tmp_path, changes, error, message
):
    monkeypatch.chdir(tmp_path)
    task = {"type": "evaluator", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": JOBS, "task": task}))
    arguments = {
        "model_fn": compiled,
        "train_spec": kerasps.TrainSpec(dataset),
        "eval_spec": kerasps.EvalSpec(dataset),
        "config": kerasps.RunConfig("run"),
        **changes,
    }
    if error is None:  # what is right goes on to wait for checkpoints
        monkeypatch.setattr(kerasps.SidecarEvaluator, "start", lambda self: "evaluations")
        assert kerasps.train_and_evaluate(**arguments) == "evaluations"
        return
    with pytest.raises(error, match=message):
        kerasps.train_and_evaluate(**arguments)


def test_train_and_evaluate_asks_for_tf_config(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(kerasps.ClusterConfigError, match="TF_CONFIG is not set"):
        kerasps.train_and_evaluate(
            keras.Sequential,
            kerasps.TrainSpec(dataset),
            kerasps.EvalSpec(dataset),
            config=kerasps.RunConfig("run"),
        )


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_mode_that_is_none_is_refused(monkeypatch, capsys, by):
    monkeypatch.setenv("KERASPS_MODE", "ring" if by == "environment" else "worker")
    options = ["--mode", "ring"] if by == "argument" else []
    with pytest.raises(SystemExit):
        main(["launch", *options, __file__])
    assert (
        "Not a mode. Expected: coordinator or worker. Received: 'ring'" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda strategy: strategy.coordinator, "has no ClusterCoordinator"),
        (lambda strategy: strategy.workers(), "does not know which workers are there"),
        (lambda strategy: strategy.staleness(), "does not measure staleness"),
        (lambda strategy: strategy.run(print), "Received: `strategy.run` of 'print'. Override"),
        (lambda strategy: strategy.run(fn=len), "Received: `strategy.run` of 'len'. Override"),
    ],
)
def test_what_needs_a_coordinator_says_what_to_use_instead(use, message):
    strategy = object.__new__(kerasps.WorkerDrivenStrategy)
    with pytest.raises(kerasps.UnsupportedError, match=re.escape(message)):
        use(strategy)


def test_neither_strategy_is_one_of_the_other():
    both = kerasps.ParameterServerStrategy, kerasps.WorkerDrivenStrategy
    assert all(issubclass(cls, tf.distribute.ParameterServerStrategy) for cls in both)
    assert not issubclass(*both)
    assert not issubclass(*reversed(both))
