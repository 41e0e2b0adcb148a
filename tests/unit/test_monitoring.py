"""The records, sockets and metrics of a status, and what `kerasps top` says without a run."""

from __future__ import annotations

import copy
import dataclasses
import http.client
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from rich.console import Console

import kerasps
from kerasps.runtime.addresses import split_address
from kerasps.tools.cli import main as cli
from kerasps.tools.cli.live.top_view import view
from kerasps.tools.monitoring import sockets
from kerasps.tools.monitoring.metrics import METRICS
from kerasps.tools.monitoring.prometheus import Endpoint
from kerasps.tools.monitoring.scalars import write_scalar
from kerasps.tools.monitoring.sockets import StatusSocket, ask_running, remove_stale_sockets
from kerasps.tools.monitoring.status import (
    ProcessUsage,
    PSRunStatus,
    RunStatus,
    TableStatus,
    WorkerRunStatus,
    described,
    status_of,
)
from kerasps.training.contract.run_meter import Rate
from kerasps.training.epoch.admission import Bounded
from kerasps.training.epoch.epoch_events import (
    EpochBegan,
    Execution,
    PassBegan,
    SessionBegan,
    SplitOpened,
    StepsAsked,
)
from kerasps.training.epoch.epoch_state import EpochState

ROOT = Path(__file__).parents[2]
USAGE = ProcessUsage(4711, 512_000_000, 12.5, 0.25)
JOBS = {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
STATUS = RunStatus(
    state="training",
    epoch=2,
    steps=1500,
    steps_total=3500,
    steps_per_second=120.5,
    seconds=12.5,
    workers=(
        WorkerRunStatus(0, "10.0.0.1:2222", "connected", 5.0, 1000, 2500, 80.0, 3, usage=USAGE),
        WorkerRunStatus(1, "10.0.0.2:2222", "lost", 1.0, 500, 1000, 0.0, 0, "", 2, 1, 0.5, 3),
    ),
    ps=(
        PSRunStatus(
            *(0, "10.0.0.3:2222", "connected", 12, 2_500_000_000),
            rows_read_per_second=1e4,
            bytes_read_total=7_000_000,
            hottest_tables=(("users/embeddings", 1e4),),
        ),
    ),
    tables=tuple(TableStatus(f"table_{i}", 10**i, 1e4 - i, 123) for i in range(7)),
    staleness_mean=0.5,
    staleness_max=3,
    coordinator=USAGE,
)


# Records


def test_a_status_is_json_and_comes_back():
    values = json.loads(json.dumps(STATUS.as_dict()))
    assert status_of(values) == STATUS
    values["workers"][0]["of_a_later_version"] = values["later"] = 1
    assert status_of(values) == STATUS


def test_a_status_prints_as_tables():
    text = str(STATUS)
    assert text.startswith(
        "training, epoch 3: 1,500 steps in 12.5 s, 120.5 steps/s; staleness 0.50"
    )
    assert re.search(r"^ +0  connected +80\.0 +1,000 +3 +- +0 +0 +- +25% +512 MB", text, re.M)
    assert re.search(
        r"^ +1  lost +0\.0 +500 +0 +- +2 +1 +0\.50 +- +- +10\.0\.0\.2:2222$", text, re.M
    )
    assert "2.5 GB" in text
    assert "and 2 more" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_view_shows_who_and_what_in_every_terminal(width):
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(view(described("<strategy>", STATUS, JOBS), width))
    text = capture.get()
    for line in text.splitlines():
        assert len(line) <= width
    assert "…" not in re.sub(r"and 2 more", "", text) or width == 40
    assert "connected" in text
    assert "lost" in text
    assert ("10.0.0.2:2222" in text) == (width == 200)


# What is counted


def test_a_rate_is_of_the_last_ten_seconds():
    rate = Rate(100.0, 0)
    for second in range(1, 31):
        rate.note(100.0 + second, 50 * second if second <= 20 else 1000 + 10 * (second - 20))
    assert rate.per_second(130.0, 1100) == pytest.approx(10.0)
    assert rate.per_second(131.0, 1100) == pytest.approx(90 / 10)
    assert rate.per_second(200.0, 1100) == 0.0, "nothing is done any more"
    assert Rate(100.0, 7).per_second(100.0, 7) == 0.0


def test_who_waits_for_what():
    state = EpochState(4, lost=[3], executions_ahead=1, collect_interval=1.0, admission=Bounded(1))
    state.handle(PassBegan(3))
    state.handle(EpochBegan())

    def activities(is_queued=False):
        found = state.workers.activities(is_queued=is_queued)
        return [(found[i].executions, found[i].waits_for) for i in range(4)]

    assert activities() == [(0, "session")] * 3 + [(0, "")]
    for worker in range(3):
        state.handle(SessionBegan(worker, False))
    assert activities()[0] == (0, "data")
    state.handle(SplitOpened(0, 100))
    state.handle(SplitOpened(1, 100))
    assert activities()[:3] == [(0, "coordinator")] * 2 + [(0, "data")]
    state.handle(StepsAsked(Execution(1, None)))
    assert sorted(activities(is_queued=True)[:2]) == [(0, "workers"), (1, "")]


# Sockets


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Directories in which nobody else has a socket, the first one so deep that no path to it fits
    into the address of a socket.
    """
    deep = tmp_path / ("d" * 80) / ("e" * 80)
    deep.mkdir(parents=True)
    found = [deep / "kerasps", tmp_path / "kerasps-other"]
    monkeypatch.setattr(sockets, "directories", lambda: found)
    return found


@pytest.fixture
def listening(places):
    def answer():
        return described("<strategy>", STATUS, JOBS)

    status_socket = StatusSocket(answer)
    status_socket.start()
    yield status_socket
    status_socket.close()


def left_by_a_killed_process(directory):
    """The socket of a process that has ended without a chance to remove it."""
    code = (
        "import os, socket; s = socket.socket(socket.AF_UNIX); os.chdir(os.sys.argv[1]); "
        "s.bind(f'{os.getpid()}.sock'); s.listen(); os._exit(0)"
    )
    directory.mkdir(mode=0o700, exist_ok=True)
    subprocess.run([sys.executable, "-c", code, directory], check=True)
    (path,) = (p for p in directory.glob("*.sock") if p.stem != str(os.getpid()))
    return path


def test_a_process_is_found_by_its_socket_and_is_gone_when_it_is_closed(places, listening):
    assert listening.path.parent == places[0]
    assert places[0].stat().st_mode & 0o777 == 0o700
    (found,) = ask_running()
    assert found.pid == os.getpid()
    assert status_of(found.reply["status"]) == STATUS
    assert ask_running(found.pid + 1) == []
    listening.close()
    listening.close()
    assert ask_running() == []
    assert not places[0].exists()


def test_sockets_of_killed_processes_are_removed(places, listening):
    stale = left_by_a_killed_process(places[0])
    assert [process.pid for process in ask_running()] == [os.getpid()]
    assert not stale.exists()
    left_by_a_killed_process(places[1])
    remove_stale_sockets()
    assert not places[1].exists()
    assert listening.path.exists()


def test_a_directory_that_others_may_enter_is_not_used(places):
    places[0].mkdir()
    places[0].chmod(0o755)  # whatever the umask is
    places[1].symlink_to(places[0])
    status_socket = StatusSocket(dict)
    status_socket.start()
    assert status_socket.path is None
    status_socket.close()
    assert ask_running() == []


def test_a_status_that_fails_is_told_as_an_error(places):
    status_socket = StatusSocket(lambda: 1 / 0)
    status_socket.start()
    (found,) = ask_running()
    assert found.reply == {"error": "ZeroDivisionError: division by zero"}
    status_socket.close()


# `kerasps top`


def top(capsys, *arguments):
    code = cli.main(["top", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_top_shows_the_only_run(capsys, listening):
    assert top(capsys, "--once") == (0, f"{STATUS}\n", "")
    code, out, _ = top(capsys, "--json", str(os.getpid()))
    assert code == 0
    assert status_of(json.loads(out)["status"]) == STATUS


def test_top_lists_several_runs(capsys, monkeypatch, listening):
    (found,) = ask_running()
    monkeypatch.setattr(
        "kerasps.tools.cli.live.running.ask_running", lambda pid=None: [found, found]
    )
    code, out, err = top(capsys)
    assert (code, out) == (1, "")
    assert "There are 2 runs." in err
    assert err.count(f"\n  kerasps top {os.getpid()}    ") == 2
    assert "training, 1,500 steps, <strategy>" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "No run was found. Expected: a process of this user"),
        (["999999999"], "999999999, which does not run. No other run answers."),
        (["here"], "Not a process id or an address. Expected: a number, or the host:port"),
        (["127.0.0.1:1"], "No run answers at 127.0.0.1:1."),
    ],
)
def test_top_says_what_is_wrong(capsys, places, arguments, says):
    code, out, err = top(capsys, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("kerasps top: error: ")
    assert says in err


def test_top_says_that_a_reply_is_no_status(capsys, places):
    status_socket = StatusSocket(lambda: {"status": {"state": "of another version"}})
    status_socket.start()
    code, _, err = top(capsys)
    status_socket.close()
    assert code == 1
    assert "is not one that this version can read" in err


def test_top_starts_without_tensorflow():
    code = (
        "import sys, kerasps.tools.cli.live.top_live; "
        "sys.exit(', '.join({'tensorflow', 'keras', 'numpy'} & {*sys.modules}) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


# The callback


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({}, ValueError, "Expected: `log_dir` for TensorBoard, `port` for Prometheus, or both"),
        ({"port": 70000}, ValueError, "Received: port=70000. Give one like 9090"),
        ({"port": "9090"}, TypeError, "Received: port='9090'"),
        ({"port": True}, TypeError, "Received: port=True"),
        ({"log_dir": ""}, ValueError, "Argument `log_dir` names no path"),
        ({"port": 0, "host": ""}, ValueError, "Received: host=''. Give one like '127.0.0.1'"),
        ({"port": 0, "host": 1}, TypeError, "Received: host=1."),
        ({"log_dir": "logs", "update_freq": 0}, ValueError, "Received: update_freq=0."),
        ({"log_dir": "logs", "update_freq": "batch"}, TypeError, "update_freq='batch'"),
    ],
)
def test_a_monitor_says_which_argument_is_wrong(arguments, error, says):
    with pytest.raises(error, match=re.escape(says)):
        kerasps.ClusterMonitor(**arguments)


def test_a_monitor_says_what_is_to_be_installed(monkeypatch):
    monkeypatch.delitem(sys.modules, "kerasps.tools.monitoring.prometheus", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=re.escape("`pip install 'prometheus-client>=0.21'`")):
        kerasps.ClusterMonitor(port=0)
    kerasps.ClusterMonitor("logs")


def test_a_monitor_does_nothing_without_a_strategy(tmp_path, caplog):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    monitor = kerasps.ClusterMonitor(tmp_path / "logs", port=0)
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[monitor])
    assert monitor.address is None
    assert not (tmp_path / "logs").exists()
    assert "A ClusterMonitor does nothing here" in caplog.text
    twin = copy.deepcopy(monitor)
    assert (twin.log_dir, twin.port) == (monitor.log_dir, 0)


# Metrics


def test_metrics_are_named_as_prometheus_wants_them():
    names = [metric.name for metric in METRICS]
    assert len({*names}) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"kerasps_[a-z_]+", metric.name)
        assert metric.text.endswith(".")
        for labels, value in metric.samples(STATUS):
            assert len(labels) == len(metric.subject.labels)
            assert isinstance(value, (int, float))


def test_a_dashboard_shows_metrics_that_there_are():
    names = {metric.name for metric in METRICS}
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "kerasps.json").read_text())
    queries = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    queries += [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    shown = {name for query in queries for name in re.findall(r"\bkerasps_\w+", query)}
    assert shown <= names
    assert len(shown) > 12
    for query in queries:
        for name in re.findall(r"\bkerasps_\w+", query):
            # A counter is of use as a rate alone, and only a counter has one.
            is_rate = re.search(rf"(rate|increase)\({name}\b", query) is not None
            assert is_rate == name.endswith("_total") or "label_values" in query, query


def test_the_page_names_every_metric():
    page = (ROOT / "docs" / "monitoring.md").read_text()
    for metric in METRICS:
        labels = ",".join(f"{label}=" for label in metric.subject.labels)
        name = f"{metric.name}{{{labels}}}" if labels else metric.name
        assert f"| `{name}` |" in page, name


def test_scalars_are_written_without_the_package_tensorboard(tmp_path, monkeypatch):
    """TensorFlow 2.21 does not install it, and `tf.summary.scalar` is in it."""

    def absent(*args, **kwargs):
        raise ImportError("tensorboard")

    for name in ("audio", "histogram", "image", "scalar", "text"):
        monkeypatch.setattr(tf.summary, name, absent)
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        write_scalar("steps", 7, 3)
    writer.close()
    (file,) = tmp_path.iterdir()
    (value,) = [
        (value.tag, event.step, float(tf.make_ndarray(value.tensor)))
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    ]
    assert value == ("steps", 3, 7.0)


def test_no_module_writes_what_needs_the_package_tensorboard():
    sources = Path(kerasps.__file__).parent.rglob("*.py")
    calls = r"tf\.summary\.(audio|histogram|image|scalar|text)\("
    assert [path.name for path in sources if re.search(calls, path.read_text())] == []


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HT", b"GET /metrics HTTP/1.1\r\n\r\n"])
def test_clients_of_the_endpoint_that_break_off_print_nothing(capfd, sent):
    before = set(threading.enumerate())
    is_broken_off = threading.Event()
    # More than the system takes without a reader.
    large = dataclasses.replace(STATUS, tables=(TableStatus("t" * 2**23, 1, 0.0, 0),))

    def read():
        is_broken_off.wait()
        return large

    endpoint = Endpoint("127.0.0.1", 0, read, dict)
    place = split_address(endpoint.address)
    for _ in range(4):
        client = socket.create_connection(place)
        client.sendall(sent)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # resets the connection
    is_broken_off.set()
    with socket.create_connection(place) as client:
        client.sendall(b"GET /status HTTP/1.0\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.0 200")
    endpoint.close()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert capfd.readouterr() == ("", "")


def test_an_endpoint_says_what_is_wrong():
    endpoint = Endpoint("127.0.0.1", 0, lambda: 1 / 0, lambda: 1 / 0)

    def answer(path):
        connection = http.client.HTTPConnection(endpoint.address)
        connection.request("GET", path)
        response = connection.getresponse()
        connection.close()
        return response.status, response.read()

    for path in ("/metrics", "/status"):
        assert answer(path) == (503, b"ZeroDivisionError: division by zero")
    assert answer("/") == (404, b"Ask for /metrics or /status.")
    endpoint.close()


def test_a_socket_of_another_container_with_this_process_id_stays(monkeypatch, tmp_path):
    monkeypatch.setattr(sockets, "directories", lambda: [tmp_path / "shared"])
    first, second = StatusSocket(dict), StatusSocket(dict)
    first.start()
    try:
        inode = os.lstat(first.path).st_ino
        second.start()  # the same process id, as the first process of each container
        assert second.path is None
        second.close()
        assert os.lstat(first.path).st_ino == inode
        # One that replaced it is not removed.
        path = first.path
        path.unlink()
        path.write_text("another's")
    finally:
        first.close()
    assert path.read_text() == "another's"
