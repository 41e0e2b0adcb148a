"""Descriptions of clusters: TF_CONFIG, cluster resolvers, and waiting for tasks."""

from __future__ import annotations

import inspect
import json
import os
import re
import socket
import subprocess
import sys
import threading

import pytest

import kerasps
from kerasps.checks import time_limit
from kerasps.cluster.connection import connect as connection
from kerasps.cluster.description import cluster_description as cluster
from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.cluster.local.cluster_resolver import check_cluster_resolver
from kerasps.cluster.members import reachability
from kerasps.cluster.members.reachability import wait_until_reachable
from kerasps.errors import ClusterConfigError, TaskUnreachableError
from kerasps.runtime import grpc_options, probe
from kerasps.runtime.grpc_options import hang_limit
from support.greeters import greeter
from support.process_checks import EVER_S, reserved_address

JOBS = {"chief": ["host0:2222"], "worker": ["host1:2222", "host2:2222"], "ps": ["host3:2222"]}
CHIEF = {"type": "chief", "index": 0}
CONNECT = {"variable": "KERASPS_CONNECT_TIMEOUT", "default": 60.0}


def tf_config(jobs=JOBS, task=CHIEF, **changes):
    return json.dumps({"cluster": {**jobs, **changes}, "task": task})


def without(job):
    return {name: tasks for name, tasks in JOBS.items() if name != job}


def listening_socket():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener, f"127.0.0.1:{listener.getsockname()[1]}"


class Clock:
    """A clock that goes on while somebody sleeps, and stands while a server takes its time."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def waits_by_a_clock(monkeypatch):
    """`wait_until_reachable` sleeps no second, and lets whoever answers take as long as it may."""
    monkeypatch.setattr(reachability, "time", Clock())
    monkeypatch.setattr(reachability, "_POLL_INTERVAL_S", 30.0)
    monkeypatch.setattr(reachability, "_SAY_AFTER_S", 30.0)
    monkeypatch.setattr(reachability, "_ATTEMPT_TIMEOUT_S", EVER_S)


def test_tf_config_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config(task={"type": "worker", "index": 1}))
    description = read_tf_config()
    assert description.jobs == {
        "chief": ("host0:2222",),
        "worker": ("host1:2222", "host2:2222"),
        "ps": ("host3:2222",),
    }
    assert (description.task_type, description.task_index, description.address) == (
        "worker",
        1,
        "host2:2222",
    )


def test_an_evaluator_has_no_address():
    assert read_tf_config(tf_config(task={"type": "evaluator", "index": 0})).address is None


def test_the_example_in_the_documentation_runs():
    example = re.search(
        r"```python\n(.*?)```", inspect.cleandoc(ClusterDescription.__doc__), re.DOTALL
    )[1]
    exec(example, {"kerasps": kerasps})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'cluster'", "TF_CONFIG is not JSON: .*Received: \"{'cluster'\". Correct the text"),
        (json.dumps({"task": CHIEF}), "TF_CONFIG has no cluster"),
        (
            json.dumps({"cluster": JOBS}),
            "TF_CONFIG does not say which task this is.*Received: None",
        ),
        (
            tf_config(without("ps")),
            "The cluster in TF_CONFIG has no ps. Expected: at least one ps task",
        ),
        (
            tf_config(without("worker")),
            "The cluster in TF_CONFIG has no worker. Expected: at least one worker task",
        ),
        (
            tf_config(without("chief")),
            "The cluster in TF_CONFIG has no chief. Expected: exactly one chief",
        ),
        (tf_config(chief=["host0:1", "host4:1"]), "has several chiefs.*Received: .*'host4:1'"),
        (
            tf_config(master=["host9:1"]),
            "has a chief and a master. Expected: one of them",
        ),
        (tf_config(ps="host3:1"), "The ps job in TF_CONFIG is not a list.*Received: host3:1"),
        (
            tf_config(ps=["host1:2222"]),
            "same address.*Received: 'host1:2222' for worker 0 and for ps 0",
        ),
        (
            tf_config(task={"type": "trainer"}),
            "task type in TF_CONFIG is not in its cluster.*Received: 'trainer'",
        ),
        (
            tf_config(task={"type": "worker", "index": 2}),
            "index from 0 to 1, since 2 worker tasks.*Received: worker 2",
        ),
        (
            tf_config(task={"type": "worker", "index": -1}),
            "task index in TF_CONFIG is not an index.*Received: -1",
        ),
        (
            tf_config(task={"type": "worker"}),
            '"index" from 0 to 1 in "task", since 2 worker tasks are listed.*Received: {\'type\'',
        ),
        (
            tf_config(task={"type": ["chief"], "index": 0}),
            r"task type .* is not a name\. Expected: one of chief, worker, ps, or evaluator, "
            r"as text\. Received: \['chief'\]",
        ),
        (tf_config()[:-1] + ', "task": {}}', 'TF_CONFIG has an entry twice.*Received: "task"'),
        (
            tf_config()[:-1] + ', "rpc_layer": "http"}',
            "rpc_layer in TF_CONFIG is not supported.*Expected: \"grpc\".*Received: 'http'",
        ),
        ("[" * 100_000, "TF_CONFIG is not JSON"),
    ],
)
def test_a_wrong_tf_config_is_refused_by_name(text, message):
    with pytest.raises(ClusterConfigError, match=message):
        read_tf_config(text)


JSON_VALUES = [
    None,
    True,
    -1,
    0,
    7,
    1.5,
    "",
    "chief",
    "host:1",
    "1",
    [],
    ["chief"],
    [["host:1"]],
    [7],
    [None],
    {},
    {"0": "host:1"},
    {"type": "ps"},
]


def places(value, path=()):
    """The path to every value in a JSON object, itself included."""
    yield path
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, entry in entries:
        yield from places(entry, (*path, key))


def changed(value, path, new):
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@pytest.mark.parametrize(
    "path",
    list(places(json.loads(tf_config()))),
    ids=lambda path: ".".join(map(str, path)) or "all",
)
def test_any_value_at_any_place_is_understood_or_refused_in_words(path):
    valid = json.loads(tf_config())
    messages = []
    for new in JSON_VALUES:
        text = json.dumps(changed(valid, path, new))
        try:
            description = read_tf_config(text)
        except ClusterConfigError as exc:
            messages.append(str(exc))
        else:
            assert description.task_type in (*description.jobs, "evaluator"), text
            assert description.address is not None, text
            # What is understood is what TensorFlow reads as well.
            assert read_tf_config(json.dumps(description.as_tf_config())) == description
    assert len(messages) >= len(JSON_VALUES) - 4
    assert [
        text
        for text in messages
        if not re.search(r"TF_CONFIG.*\. Expected: .+\. Received: .*Correct", text)
    ] == []


@pytest.mark.parametrize(
    "address",
    [
        "host 3:1",
        "host3:٣",
        "host3:" + "9" * 5000,
        "grpc://host3:1",
        "host3",
        "host3:",
        ":2222",
        "host3:0",
        "host3:70000",
        "host3:http",
        "::1:2222",
        "",
        2222,
    ],
)
def test_a_malformed_address_is_refused(address):
    with pytest.raises(
        ClusterConfigError,
        match=rf"address of the ps job in TF_CONFIG is malformed.*Received: {address!r}",
    ):
        read_tf_config(tf_config(ps=[address]))


def test_an_ipv6_address_is_accepted_in_brackets():
    assert read_tf_config(tf_config(ps=["[::1]:2222"])).addresses["ps", 0] == "[::1]:2222"
    assert cluster.split_address("[::1]:2222") == ("::1", 2222)


@pytest.mark.parametrize("value", [None, " "])
def test_a_missing_tf_config_says_how_to_get_one(monkeypatch, value):
    if value is None:
        monkeypatch.delenv("TF_CONFIG", raising=False)
    else:
        monkeypatch.setenv("TF_CONFIG", value)
    with pytest.raises(ClusterConfigError, match=r"TF_CONFIG is not set.*kerasps launch"):
        read_tf_config()


def resolver(jobs=JOBS, task_type="chief", task_id=0):
    import tensorflow as tf

    spec = tf.train.ClusterSpec(jobs)
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type=task_type, task_id=task_id, rpc_layer="grpc"
    )


def test_a_cluster_resolver_is_described():
    assert check_cluster_resolver(resolver()) == read_tf_config(tf_config())


def test_an_explicit_timeout_beats_the_environment_beats_the_default(monkeypatch):
    monkeypatch.delenv("KERASPS_CONNECT_TIMEOUT", raising=False)
    assert time_limit(None, **CONNECT) == 60.0
    monkeypatch.setenv("KERASPS_CONNECT_TIMEOUT", "2.5")
    assert time_limit(None, **CONNECT) == 2.5
    assert time_limit(7, **CONNECT) == 7.0


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf", "nan"])
def test_a_timeout_in_the_environment_that_is_none_is_refused(monkeypatch, value):
    monkeypatch.setenv("KERASPS_CONNECT_TIMEOUT", value)
    with pytest.raises(
        ValueError, match=r"KERASPS_CONNECT_TIMEOUT is not a time limit.*Received: "
    ):
        time_limit(None, **CONNECT)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), True, "60"])
def test_a_timeout_that_is_none_is_refused(value):
    with pytest.raises(
        ValueError, match=rf"`timeout_s` is not a time limit.*Received: timeout_s={value!r}"
    ):
        time_limit(value, **CONNECT)


def test_reachable_tasks_are_not_waited_for():
    with greeter() as address:
        wait_until_reachable({("ps", 0): address}, timeout_s=EVER_S)
    wait_until_reachable({}, timeout_s=EVER_S)


def test_a_task_that_starts_late_is_waited_for():
    holder, address = reserved_address()
    refused, ended = threading.Event(), threading.Event()

    def listen_when_it_was_refused():
        refused.wait()
        with holder, greeter(server_address=holder.getsockname()):
            ended.wait()

    thread = threading.Thread(target=listen_when_it_was_refused, daemon=True)
    thread.start()
    errors = reachability.unreachable({("ps", 0): address}, EVER_S)
    assert errors == {("ps", 0): "Connection refused"}
    refused.set()
    wait_until_reachable({("ps", 0): address}, timeout_s=EVER_S)
    ended.set()
    thread.join()


def test_every_task_that_cannot_be_reached_is_named_at_the_limit(waits_by_a_clock):
    holder, missing = reserved_address()
    tasks = {("worker", 1): missing, ("ps", 0): "no-such-host.invalid:2222"}
    with greeter() as there, holder, pytest.raises(TaskUnreachableError) as caught:
        wait_until_reachable({("worker", 0): there, **tasks}, timeout_s=600)
    message = str(caught.value)
    assert message.startswith("2 of 3 tasks could not be reached within 600 s.")
    assert f"worker 1 at {missing} (Connection refused)" in message
    assert "ps 0 at no-such-host.invalid:2222 (" in message
    assert "worker 0" not in message
    assert "KERASPS_CONNECT_TIMEOUT" in message


def test_who_is_waited_for_is_said_at_growing_intervals(waits_by_a_clock, caplog):
    holder, missing = reserved_address()
    tasks = {("worker", 0): missing}
    with greeter() as there, holder, pytest.raises(TaskUnreachableError):
        wait_until_reachable({("ps", 0): there, **tasks}, timeout_s=600)
    said = [record.getMessage() for record in caplog.records if record.name == "kerasps"]
    # At the first poll after 30, 60, 120, 240 and 480 s.
    assert said == [
        f"Waiting for 1 of 2 tasks since {seconds} s, for 600 s at most: "
        f"worker 0 at {missing} (Connection refused)."
        for seconds in (60, 90, 150, 270, 510)
    ]
    caplog.clear()
    with greeter() as there:
        wait_until_reachable({("ps", 0): there}, timeout_s=EVER_S)
    assert caplog.records == []


def test_who_listens_and_is_no_server_is_named():
    silent, address = listening_socket()
    with silent, greeter(b"220 mail.example.com ESMTP\r\n") as other:
        assert reachability.unreachable({("ps", 0): address}, 0.3) == {
            ("ps", 0): "connected, but no answer"
        }
        assert reachability.unreachable({("worker", 0): other}, EVER_S) == {
            ("worker", 0): "connected, but something else than a TensorFlow server answers"
        }


def test_servers_are_asked_side_by_side():
    both = threading.Barrier(2)  # neither answers before both were asked
    holder, closed = reserved_address()
    with holder, greeter(when=both.wait) as here, greeter(when=both.wait) as there:
        answers = probe.ask_servers({1: here, 2: closed, 3: there}, EVER_S)
    answer = probe.Answer
    assert answers == {1: answer.SERVES, 2: answer.REFUSES, 3: answer.SERVES}
    assert probe.ask_servers({}, EVER_S) == {}


def test_servers_that_do_not_answer_are_silent_at_the_limit():
    silent, address = listening_socket()
    with silent:
        tasks = {1: address, 2: "no-such-host.invalid:2222", 3: address}
        assert probe.ask_servers(tasks, 0.3) == dict.fromkeys(tasks, probe.Answer.IS_SILENT)


@pytest.mark.parametrize("others", [["127.0.0.9"], ["127.0.0.9", "127.0.0.8"]])
def test_a_host_of_several_addresses_serves_where_one_does(monkeypatch, others):
    """As `localhost`, which is `::1` and `127.0.0.1`: a server listens on one of them."""
    resolve = socket.getaddrinfo

    def several(host, *options, **named):
        hosts = [*others, "127.0.0.1"] if host == "several.invalid" else [host]
        return [place for host in hosts for place in resolve(host, *options, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", several)
    answer = probe.Answer
    with greeter() as there:
        port = cluster.split_address(there)[1]
        address = f"several.invalid:{port}"
        assert probe.ask_servers({1: address}, EVER_S) == {1: answer.SERVES}
        with socket.create_server((others[0], port)):
            # The silent one is not waited for.
            assert probe.ask_servers({1: address}, EVER_S) == {1: answer.SERVES}
        with socket.create_connection(cluster.split_address(there)) as end:
            end.recv(1)
            assert probe.break_connections(address) == 1
    assert probe.ask_servers({1: address}, EVER_S) == {1: answer.REFUSES}
    with socket.create_server((others[0], port)):
        assert probe.ask_servers({1: address}, 0.3) == {1: answer.IS_SILENT}


def test_a_silent_machine_is_looked_for_where_its_name_leads_by_now(monkeypatch):
    """A machine that is gone sends no refusal; Kubernetes gives its name to another one."""
    resolve, place = socket.getaddrinfo, ["127.0.0.9"]

    def moving(host, *options, **named):
        if host == "moving.invalid" and place[0] is None:
            raise socket.gaierror(socket.EAI_AGAIN, "the resolver is out of reach")
        return resolve(place[0] if host == "moving.invalid" else host, *options, **named)

    monkeypatch.setattr(socket, "getaddrinfo", moving)
    monkeypatch.setattr(probe, "_RESOLVE_EVERY_S", 0.0)
    answer = probe.Answer
    with greeter() as there:
        port = cluster.split_address(there)[1]
        address = f"moving.invalid:{port}"
        with socket.create_server(("127.0.0.9", port)):
            assert probe.ask_servers({1: address}, 0.3) == {1: answer.IS_SILENT}
            place[0] = None
            assert probe.ask_servers({1: address}, 0.3) == {1: answer.IS_SILENT}
            place[0] = "127.0.0.1"
            assert probe.ask_servers({1: address}, EVER_S) == {1: answer.SERVES}
        # Who answers is not looked for each time.
        place[0] = None
        assert probe.ask_servers({1: address}, EVER_S) == {1: answer.SERVES}


def test_connections_to_an_address_are_broken_and_no_others():
    with greeter() as here, greeter() as there:
        ends = [socket.create_connection(cluster.split_address(a)) for a in (here, there, here)]
        for end in ends:
            end.recv(1)
        assert probe.break_connections(here) == 2
        assert [len(end.recv(100)) > 0 for end in ends] == [True, True, True]
        assert [end.recv(100) for end in (ends[0], ends[2])] == [b"", b""]
        ends[1].setblocking(False)
        with pytest.raises(BlockingIOError):  # it is open, and nothing came
            ends[1].recv(1)
        for end in ends:
            end.close()
        assert probe.break_connections(here) == 0


def test_a_connection_to_itself_is_no_server():
    with socket.socket() as itself:
        itself.bind(("127.0.0.1", 0))
        itself.connect(itself.getsockname())
        assert probe.is_connected_to_itself(itself)
    listener, address = listening_socket()
    with listener, socket.create_connection(cluster.split_address(address)) as connection:
        assert not probe.is_connected_to_itself(connection)


def test_a_probe_tells_refusal_from_silence():
    listener, there = listening_socket()
    holder, closed = reserved_address()
    with listener, holder:
        assert probe.connection_error(there, EVER_S) is None
        assert isinstance(probe.connection_error(closed, EVER_S), ConnectionRefusedError)
    unknown = probe.connection_error("no-such-host.invalid:2222", EVER_S)
    assert isinstance(unknown, OSError)
    assert not isinstance(unknown, ConnectionRefusedError)


def test_importing_the_process_layer_does_not_import_tensorflow():
    modules = (
        "kerasps.tools.cli.main, kerasps.tools.cli.commands.launch, "
        "kerasps.cluster.local.local_cluster, kerasps.cluster.processes.process, "
        "kerasps.cluster.server"
    )
    code = f"import sys, {modules}; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("ps", "is_one"),
    [
        ("127.0.0.1:2222", True),
        ("localhost:2222", True),
        ("[::1]:2222", True),
        ("10.0.0.1:2222", False),
        ("host3:2222", False),
    ],
)
def test_a_cluster_on_the_loopback_is_on_one_machine(ps, is_one):
    description = read_tf_config(tf_config(worker=["127.0.0.1:1"], ps=[ps]))
    assert description.is_on_one_machine == is_one


def connecting_to(*addresses):
    return ClusterDescription(
        {"chief": ("127.0.0.1:1",), "worker": addresses[:1], "ps": addresses[1:]}, "chief", 0
    )


def test_a_task_that_goes_while_tensorflow_connects_is_named(monkeypatch):
    clock, never = Clock(), threading.Event()

    def ask_servers(addresses, seconds):
        answers = probe.ask_servers(addresses, EVER_S)
        clock.sleep(2 * hang_limit())
        return answers

    monkeypatch.setattr(connection, "time", clock)
    monkeypatch.setattr(connection, "ask_servers", ask_servers)
    holder, gone = reserved_address()
    with holder, greeter() as there, pytest.raises(TaskUnreachableError) as caught:
        connection._wait_for_tasks(never.wait, connecting_to(there, gone))
    never.set()
    assert f"Received: ps 0 at {gone} (connection refused)." in str(caught.value)
    assert "worker" not in str(caught.value).partition("Received")[2]


def test_what_connecting_ends_in_is_passed_on():
    def fail():
        raise ValueError("not so")

    connection._wait_for_tasks(lambda: None, connecting_to("127.0.0.1:2", "127.0.0.1:3"))
    with pytest.raises(ValueError, match="not so"):
        connection._wait_for_tasks(fail, connecting_to("127.0.0.1:2", "127.0.0.1:3"))


def test_the_options_of_grpc_leave_the_users_own(monkeypatch):
    monkeypatch.setenv("KERASPS_HANG_TIMEOUT", "20")
    monkeypatch.setenv("TF_GRPC_DEFAULT_OPTIONS", "grpc.keepalive_time_ms=1")
    grpc_options.set_grpc_options()
    grpc_options.set_grpc_options()
    assert os.environ["TF_GRPC_DEFAULT_OPTIONS"].split(",") == [
        "grpc.keepalive_time_ms=1",
        "grpc.min_reconnect_backoff_ms=2000",
        "grpc.max_reconnect_backoff_ms=2000",
        "grpc.dns_min_time_between_resolutions_ms=2000",
        "grpc.keepalive_timeout_ms=21000",
        "grpc.http2.ping_timeout_ms=21000",
    ]


def test_pings_are_rare_where_a_server_limits_them(monkeypatch):
    def options(limited):
        grpc_options.set_grpc_options(servers_limit_pings=limited)
        return os.environ["TF_GRPC_DEFAULT_OPTIONS"].split(",")

    monkeypatch.setenv("TF_GRPC_DEFAULT_OPTIONS", "grpc.compression=1")
    often, any_number = "grpc.keepalive_time_ms=2500", "grpc.http2.max_pings_without_data=0"
    for limited in (None, False, True, None):
        given = options(limited)
        assert given.count("grpc.compression=1") == 1
        assert (often in given, any_number in given) == (not limited, limited is False)
        assert ("grpc.keepalive_time_ms=310000" in given) is bool(limited)


def test_a_limit_for_tasks_that_hang_which_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("KERASPS_HANG_TIMEOUT", "soon")
    with pytest.raises(ValueError, match=r"KERASPS_HANG_TIMEOUT.*'soon'"):
        grpc_options.hang_limit()
