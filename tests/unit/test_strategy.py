"""What `ParameterServerStrategy` checks before it connects. Nothing in here ever connects."""

from __future__ import annotations

import dataclasses
import json
import socket

import keras
import pytest
import tensorflow as tf

import kerasps
from kerasps.cluster.local.cluster_resolver import as_resolver, check_cluster_resolver
from kerasps.coordinator_host import CoordinatorHost
from kerasps.runtime.addresses import split_address
from kerasps.runtime.connected import connected_strategy
from kerasps.strategy_arguments import StrategyOptions
from support.greeters import greeter
from support.process_checks import EVER_S

JOBS = {"chief": ["127.0.0.1:2"], "worker": ["127.0.0.1:3"], "ps": ["127.0.0.1:4"]}


@pytest.fixture(autouse=True)
def never_connects(monkeypatch):
    """Fails the test if the strategy gets as far as TensorFlow, or hooks Keras, or keeps what only
    a connection may keep.
    """

    def connect(*args, **kwargs):
        pytest.fail("the strategy went on to connect")

    # The first thing once all tasks are there.
    monkeypatch.setattr(CoordinatorHost, "connect", connect)
    monkeypatch.setattr(tf.distribute.ParameterServerStrategy, "__init__", connect)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("KERASPS_CONNECT_TIMEOUT", raising=False)
    code = keras.Variable.__init__.__code__
    yield
    assert keras.Variable.__init__.__code__ is code
    assert connected_strategy() is None


def resolver(task_type="chief", **jobs):
    spec = tf.train.ClusterSpec({name: tasks for name, tasks in {**JOBS, **jobs}.items() if tasks})
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type=task_type, task_id=0, rpc_layer="grpc"
    )


def closed_address(holder):
    holder.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{holder.getsockname()[1]}"


@pytest.mark.parametrize(
    ("value", "error"), [("2", TypeError), (True, TypeError), (1.5, TypeError), (0, ValueError)]
)
def test_max_staleness_is_a_number_of_steps(value, error):
    with pytest.raises(error, match="Argument `max_staleness` is not a number of steps") as caught:
        kerasps.ParameterServerStrategy(resolver(), max_staleness=value)
    assert (
        f"Expected: a whole number of at least 1. Received: max_staleness={value!r}. Give the "
        "number of steps by which a worker may lead the slowest"
    ) in str(caught.value)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_overlap_is_true_or_false(value):
    with pytest.raises(TypeError, match="Argument `overlap` must say") as caught:
        kerasps.ParameterServerStrategy(resolver(), overlap=value)
    assert f"Expected: True or False. Received: overlap={value!r}." in str(caught.value)


@pytest.mark.parametrize(
    ("value", "error", "part"),
    [
        ("int8", ValueError, "Expected: 'bfloat16' or 'float16'. Received: wire_dtype='int8'"),
        ({"dense": "float32"}, ValueError, "Received: wire_dtype='float32'"),
        ({3: "float16"}, TypeError, "Received: wire_dtype={3: 'float16'}"),
        (16, TypeError, "Received: wire_dtype=16"),
    ],
)
def test_what_is_no_dtype_to_travel_in_is_refused(value, error, part):
    with pytest.raises(error) as caught:
        kerasps.ParameterServerStrategy(resolver(), wire_dtype=value)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "part"),
    [
        ({"update_mode": "both"}, ValueError, "Expected: 'async' or 'sync'. Received: update_mode"),
        ({"num_backup_workers": 1}, ValueError, "Expected: num_backup_workers=0 with"),
        ({"num_backup_workers": "1"}, TypeError, "Received: num_backup_workers='1'"),
        ({"num_backup_workers": -1}, ValueError, "a whole number of at least 0"),
        ({"update_mode": "sync", "num_backup_workers": 9}, ValueError, "leaves no worker"),
        ({"update_mode": "sync", "max_staleness": 2}, ValueError, "Received: max_staleness=2"),
        ({"update_mode": "sync", "overlap": True}, ValueError, "Received: overlap=True"),
    ],
    ids=str,
)
def test_what_does_not_go_with_how_updates_are_made(arguments, error, part):
    with pytest.raises(error) as caught:
        kerasps.ParameterServerStrategy(resolver(), **arguments)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ({"ps": []}, "has no ps. Expected: at least one ps task, which holds the variables"),
        (
            {"worker": []},
            "has no worker. Expected: at least one worker task, which computes the steps",
        ),
        (
            {"worker": ["127.0.0.1:3", "127.0.0.1:3"]},
            "same address.*Received: '127.0.0.1:3' for worker 0 and for worker 1",
        ),
        ({"ps": ["nowhere"]}, "An address of the ps job .* is malformed.*Received: 'nowhere'"),
    ],
)
def test_a_wrong_cluster_resolver_is_refused_by_name(jobs, message):
    with pytest.raises(
        kerasps.ClusterConfigError, match=rf"{message}.*Correct the cluster resolver\."
    ):
        kerasps.ParameterServerStrategy(resolver(**jobs))


NO_RESOLVERS = [
    (JOBS, "of type dict. Make a resolver of the dictionary: `tf.distribute.cluster_resolver.Sim"),
    ({"cluster": JOBS, "task": {}}, "os.environ['TF_CONFIG'] = json.dumps"),
    ("grpc://127.0.0.1:3", "One address does not say which tasks there are"),
    (tf.train.ClusterSpec(JOBS), "of type ClusterSpec. Make a resolver of its tasks"),
    (
        kerasps.ClusterDescription({job: tuple(JOBS[job]) for job in JOBS}, "chief", 0),
        "of type ClusterDescription. Make a resolver of its tasks",
    ),
    (
        tf.distribute.cluster_resolver.SimpleClusterResolver,
        "Make an object of it: `SimpleClusterResolver",
    ),
    (kerasps.LocalCluster, "Make an object of it: `LocalCluster(...)`"),
    (kerasps.MinSizePartitioner(), "A partitioner is the second argument"),
    (3, "of type int. Make one"),
]


@pytest.mark.parametrize("strategy", ["ParameterServerStrategy", "WorkerDrivenStrategy"])
@pytest.mark.parametrize(("given", "advice"), NO_RESOLVERS, ids=[a[-30:] for _, a in NO_RESOLVERS])
def test_what_is_no_cluster_resolver_is_refused_by_name(strategy, given, advice):
    with pytest.raises(
        kerasps.ClusterConfigError,
        match=r"`cluster_resolver` is not a cluster resolver\. Expected: a "
        r"`tf.distribute.cluster_resolver.ClusterResolver`.* Received: cluster_resolver=",
    ) as caught:
        getattr(kerasps, strategy)(given)
    assert advice in str(caught.value)


@pytest.mark.parametrize("chief", [{}, {"chief": []}])
@pytest.mark.parametrize("task_type", [None, "chief"])
def test_a_resolver_without_a_chief_gets_this_process(chief, task_type):
    jobs = {"worker": ["localhost:3"], "ps": ["127.0.0.1:4"], **chief}
    given = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type=task_type, rpc_layer="grpc"
    )
    described = check_cluster_resolver(given)
    assert (described.task_type, described.task_index) == ("chief", 0)
    host, port = split_address(described.address)
    assert host == "127.0.0.1"
    # It is kept from others, and is the same one when the strategy is made again.
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((host, port))
    assert check_cluster_resolver(given) == described
    jobs["worker"].append("localhost:5")
    grown = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(jobs))
    assert check_cluster_resolver(grown).address != described.address


def test_the_chief_of_remote_tasks_is_where_they_reach_it():
    given = resolver(chief=[], worker=["192.0.2.1:3"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 3))
            expected = probe.getsockname()[0]
        except OSError:  # a machine without a network
            expected = "127.0.0.1"
    assert split_address(check_cluster_resolver(given).address)[0] == expected


@pytest.mark.parametrize("task_type", ["worker", "ps"])
def test_a_task_of_a_resolver_without_a_chief_is_told_to_serve(task_type):
    with pytest.raises(kerasps.ClusterConfigError, match="Only the chief"):
        kerasps.ParameterServerStrategy(resolver(task_type, chief=[]))


def test_a_tf_config_without_a_chief_is_told_how_to_name_one(monkeypatch):
    jobs = {job: JOBS[job] for job in ("worker", "ps")}
    for task_type in ("chief", "worker"):
        task = {"type": task_type, "index": 0}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": task}))
        with pytest.raises(
            kerasps.ClusterConfigError,
            match=r"TF_CONFIG has no chief.*Add \"chief\": \[\"host:port\"\] to the cluster in "
            r"every task.*`kerasps.WorkerDrivenStrategy`.*Correct TF_CONFIG",
        ):
            kerasps.ParameterServerStrategy()


def test_a_local_cluster_stands_for_its_resolver():
    cluster = object.__new__(kerasps.LocalCluster)  # its tasks are not asked for
    cluster._description = kerasps.ClusterDescription(
        {job: tuple(JOBS[job]) for job in JOBS}, "chief", 0
    )
    assert check_cluster_resolver(as_resolver(cluster)) == cluster._description
    with pytest.raises(kerasps.ClusterConfigError, match="`kerasps launch --mode worker`"):
        kerasps.WorkerDrivenStrategy(cluster)


@pytest.mark.parametrize(
    ("text", "message"), [("", "TF_CONFIG is not set"), ("{'a'", "TF_CONFIG is not JSON")]
)
def test_tensorflows_resolver_of_tf_config_says_what_is_wrong_with_it(monkeypatch, text, message):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(kerasps.ClusterConfigError, match=message):
        kerasps.ParameterServerStrategy(
            tf.distribute.cluster_resolver.TFConfigClusterResolver(task_type="chief")
        )


def test_an_rpc_layer_that_tasks_do_not_speak_is_refused():
    given = resolver()
    given.rpc_layer = "http"
    with pytest.raises(kerasps.ClusterConfigError, match=r"rpc_layer.*Received: rpc_layer='http'"):
        kerasps.ParameterServerStrategy(given)


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("run_id", 3, TypeError),
        ("chief_timeout", "x", ValueError),
        ("chief_timeout", 0, ValueError),
    ],
)
def test_an_argument_of_worker_driven_training_is_refused_before_it_connects(
    argument, value, error
):
    with pytest.raises(error, match=f"`{argument}` is not .*Received: {argument}={value!r}"):
        kerasps.WorkerDrivenStrategy(resolver("worker"), **{argument: value})


def test_without_tf_config_the_error_says_how_to_start_a_cluster():
    with pytest.raises(
        kerasps.ClusterConfigError,
        match=r"TF_CONFIG is not set.*`kerasps launch`.*`kerasps.LocalCluster`",
    ):
        kerasps.ParameterServerStrategy()


@pytest.mark.parametrize("task_type", ["worker", "ps"])
def test_a_task_that_is_not_the_chief_is_told_to_serve(monkeypatch, task_type):
    message = (
        rf"Only the chief.*Received: task type '{task_type}', index 0. "
        rf"Run `kerasps serve` in this {task_type} task"
    )
    with pytest.raises(kerasps.ClusterConfigError, match=message):
        kerasps.ParameterServerStrategy(resolver(task_type))
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": JOBS, "task": {"type": task_type, "index": 0}})
    )
    with pytest.raises(kerasps.ClusterConfigError, match=message):
        kerasps.ParameterServerStrategy()


def test_an_evaluator_is_told_that_it_needs_no_strategy(monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG", json.dumps({"cluster": JOBS, "task": {"type": "evaluator", "index": 0}})
    )
    with pytest.raises(kerasps.ClusterConfigError, match="An evaluator creates no strategy"):
        kerasps.ParameterServerStrategy()


@pytest.mark.parametrize(
    ("argument", "value", "expected"),
    [("shard_layout", "range", "'mod' or 'div'"), ("sparse_updates", True, "'lazy' or 'dense'")],
)
def test_a_choice_that_is_none_is_refused(argument, value, expected):
    with pytest.raises(ValueError, match=f"`{argument}` is not one of its values") as caught:
        kerasps.ParameterServerStrategy(resolver(), **{argument: value})
    expected = f"Expected: {expected}. Received: {argument}={value!r}. Give one of these."
    assert str(caught.value).endswith(expected)


@pytest.mark.parametrize("partitioner", [2, "fixed", [2, 1], kerasps.MinSizePartitioner])
def test_a_partitioner_that_cannot_be_called_is_refused(partitioner):
    with pytest.raises(
        TypeError, match="`variable_partitioner` must be a callable of `shape` and `dtype`"
    ) as caught:
        kerasps.ParameterServerStrategy(resolver(), partitioner)
    assert f"Received: variable_partitioner={partitioner!r}. " in str(caught.value)


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_tasks_that_cannot_be_reached_are_named_within_the_limit(monkeypatch, by):
    if by == "environment":
        monkeypatch.setenv("KERASPS_CONNECT_TIMEOUT", "0.4")
    else:  # an argument beats the environment
        monkeypatch.setenv("KERASPS_CONNECT_TIMEOUT", str(EVER_S))
    arguments = {"connect_timeout": 0.4} if by == "argument" else {}
    with socket.socket() as one, socket.socket() as other:
        worker, ps = closed_address(one), closed_address(other)
        for _ in range(2):  # a strategy that could not connect leaves room for another one
            with pytest.raises(kerasps.TaskUnreachableError) as caught:
                kerasps.ParameterServerStrategy(resolver(worker=[worker], ps=[ps]), **arguments)
            assert "2 of 2 tasks could not be reached within 0.4 s" in str(caught.value)
            assert f"worker 0 at {worker} (Connection refused)" in str(caught.value)
            assert f"ps 0 at {ps} (Connection refused)" in str(caught.value)


def test_the_chief_is_not_waited_for():
    went_on = pytest.raises(pytest.fail.Exception, match="went on to connect")
    with greeter() as here, greeter() as there, went_on:
        kerasps.ParameterServerStrategy(resolver(worker=[here], ps=[there]), connect_timeout=EVER_S)


OPTIONS = StrategyOptions(
    variable_partitioner=None, shard_layout="mod", sparse_updates="lazy", table_min_bytes=0
)


@pytest.mark.parametrize(
    "make",
    [
        lambda: kerasps.FixedShardsPartitioner(2),
        lambda: kerasps.MinSizePartitioner(),
        lambda: kerasps.MaxSizePartitioner(1 << 20),
    ],
)
def test_a_partitioner_that_is_made_anew_is_alike(make):
    """As where a notebook's cell runs again."""
    one, other = (dataclasses.replace(OPTIONS, variable_partitioner=make()) for _ in range(2))
    one.check_alike(other)


@pytest.mark.parametrize("field", dataclasses.fields(OPTIONS), ids=lambda field: field.name)
def test_the_argument_that_differs_is_named(field):
    other = dataclasses.replace(OPTIONS, **{field.name: "another"})
    with pytest.raises(ValueError, match=f"Argument `{field.name}` differs") as caught:
        other.check_alike(OPTIONS)
    assert f"Received: {field.name}='another'." in str(caught.value)
