"""Clusters of real processes: they start, die, come back and leave nothing behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest

import kerasps
from kerasps.cluster import server
from kerasps.cluster.local.local_cluster import task_watch_of
from kerasps.cluster.members.reachability import wait_until_reachable
from kerasps.errors import TaskStartError
from kerasps.runtime.addresses import split_address
from kerasps.runtime.supervision import Notice
from support.process_checks import (
    EVER_S,
    environment_of,
    is_alive,
    is_free,
    is_listening,
    listening_addresses,
    marked_environment,
    marked_processes,
    mode_of,
    name_of,
    temporary_files,
    wait_for,
)


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch, tmp_path):
    """Every test must end with the processes, threads, files and descriptors that it began with."""
    mark = str(uuid.uuid4())
    for name, value in marked_environment(mark, tmp_path).items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    threads = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    yield mark
    gc.collect()
    assert marked_processes(mark) == {}
    assert temporary_files(tmp_path) == []
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def pids(cluster):
    return [process.pid for process in cluster.processes.values()]


def test_a_cluster_starts_serves_and_leaves_nothing():
    with kerasps.LocalCluster(num_workers=2, num_ps=1) as cluster:
        assert repr(cluster) == "<LocalCluster num_workers=2 num_ps=1 open>"
        assert list(cluster.processes) == [("worker", 0), ("worker", 1), ("ps", 0)]
        addresses = cluster.description.addresses
        assert len(set(addresses.values())) == 4
        wait_until_reachable(cluster.description.server_addresses, timeout_s=EVER_S)
        assert cluster.tf_config["task"] == {"type": "chief", "index": 0}
        for (task_type, index), process in cluster.processes.items():
            assert process.address == addresses[task_type, index]
            assert process.log_file == cluster.log_dir / f"{task_type}-{index}.log"
            assert mode_of(process.log_file) == "0o600"
            assert listening_addresses(process.pid) == {split_address(process.address)}
            assert name_of(process.pid) == f"{task_type}-{index}"
            # Ctrl-C in the terminal goes to the coordinator's session only.
            assert os.getsid(process.pid) == process.pid
        assert mode_of(cluster.log_dir) == "0o700"
        running = pids(cluster)
    assert repr(cluster) == "<LocalCluster num_workers=2 num_ps=1 closed>"
    assert not any(is_alive(pid) for pid in running)
    assert all(is_free(address) for address in addresses.values())
    assert not cluster.log_dir.exists()
    cluster.close()
    assert {process.describe_exit() for process in cluster.processes.values()} == {"exit code 0"}


def test_a_log_directory_that_was_given_is_made_and_kept(tmp_path):
    log_dir = tmp_path / "new" / "logs"
    with kerasps.LocalCluster(num_workers=1, log_dir=log_dir):
        pass
    assert sorted(path.name for path in log_dir.iterdir()) == ["ps-0.log", "worker-0.log"]
    assert mode_of(log_dir) == "0o700"


def test_what_the_processes_find_in_their_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    before = dict(os.environ)
    with kerasps.LocalCluster(num_workers=2, num_ps=1) as cluster:
        found = {task: environment_of(process.pid) for task, process in cluster.processes.items()}
    assert dict(os.environ) == before
    visible = {task: env["CUDA_VISIBLE_DEVICES"] for task, env in found.items()}
    assert visible == {("worker", 0): "3", ("worker", 1): "5", ("ps", 0): "-1"}
    assert {task: env.get("TF_FORCE_GPU_ALLOW_GROWTH") for task, env in found.items()} == {
        ("worker", 0): "true",
        ("worker", 1): "true",
        ("ps", 0): None,
    }
    assert {env["TF_CPP_MIN_LOG_LEVEL"] for env in found.values()} == {"2"}
    assert json.loads(found["worker", 1]["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}


def test_a_killed_task_comes_back_at_its_address_and_a_running_one_can_be_restarted():
    with kerasps.LocalCluster(num_workers=1, num_ps=1) as cluster:
        process = cluster.processes["worker", 0]
        pid, address = process.pid, process.address
        cluster.kill("worker", 0)
        assert not is_alive(pid)
        assert not is_listening(address)
        assert process.describe_exit() == "signal SIGKILL"
        # Held while the task is away: nobody who asks for a port can get this one.
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(split_address(address))
        cluster.restart("worker", 0)
        assert process.pid != pid
        assert process.address == address
        assert is_listening(address)
        pid = cluster.processes["ps", 0].pid
        cluster.restart("ps", 0)
        assert not is_alive(pid)
        assert is_listening(cluster.processes["ps", 0].address)
        # Tasks that do not exist are named.
        for method in (cluster.kill, cluster.restart):
            with pytest.raises(
                ValueError,
                match=r"no such task. Expected: one of worker 0, ps 0\. .*'ps', task_index=1",
            ):
                method("ps", 1)
    for method in (cluster.kill, cluster.restart):
        with pytest.raises(
            ValueError,
            match=r"The cluster is closed. .*: <LocalCluster num_workers=1 num_ps=1 closed>",
        ):
            method("ps", 0)


def test_a_task_that_died_by_itself_is_reported_and_its_log_kept(tmp_path):
    cluster = kerasps.LocalCluster(num_workers=1, num_ps=1)
    os.kill(cluster.processes["ps", 0].pid, signal.SIGKILL)
    wait_for(cluster.processes["ps", 0].has_ended)
    with pytest.warns(
        RuntimeWarning,
        match=r"died before it was closed: ps 0 \(signal SIGKILL\). Their logs are kept in /",
    ):
        cluster.close()
    assert temporary_files(tmp_path) == [cluster.log_dir.name]
    remove_logs(cluster.log_dir)


def replaced(process, pid):
    """Waits until another process of the task serves."""
    wait_for(lambda: process.pid != pid and is_listening(process.address), what="a new process")
    return process.pid


def test_a_worker_that_dies_is_started_again_as_often_as_it_may(capfd):
    with kerasps.LocalCluster(num_workers=2, num_ps=1, max_restarts=1) as cluster:
        process = cluster.processes["worker", 1]
        others = [cluster.processes["worker", 0].pid, cluster.processes["ps", 0].pid]
        pid = process.pid
        with process.log_file.open("a") as log:
            log.write("the last words of worker 1\n")
        os.kill(pid, signal.SIGKILL)
        again = replaced(process, pid)
        assert not is_alive(pid)
        err = capfd.readouterr().err.splitlines()
        assert err[:6] == [
            "kerasps: worker 1 died. It is started again, 1 of 1 in this hour.",
            f"  task: worker 1 at {process.address}",
            f"  pid: {pid}",
            "  ended by: signal SIGKILL",
            f"  log file: {process.log_file}",
            "  last lines:",
        ]
        assert err[-1] == "    the last words of worker 1"
        os.kill(again, signal.SIGABRT)
        wait_for(process.has_ended)
        err = []
        wait_for(lambda: err.extend(capfd.readouterr().err.splitlines()) or len(err) > 5)
        assert (
            err[0] == "kerasps: worker 1 died. It is not started again: 1 restart within an hour."
        )
        assert "  ended by: signal SIGABRT" in err
        # The words of the process before explain nothing about this one.
        assert "    the last words of worker 1" not in err
        assert [cluster.processes["worker", 0].pid, cluster.processes["ps", 0].pid] == others
        with pytest.warns(RuntimeWarning, match=r"closed: worker 1 \(signal SIGABRT\)"):
            cluster.close()
    remove_logs(cluster.log_dir)


def test_a_task_that_was_killed_stays_dead_until_its_restart():
    with kerasps.LocalCluster(num_workers=2, num_ps=1) as cluster:
        first, second = (cluster.processes["worker", index] for index in range(2))
        cluster.kill("worker", 0)
        pid = second.pid
        os.kill(pid, signal.SIGKILL)
        # The cluster has looked at its processes.
        replaced(second, pid)
        assert first.has_ended()
        cluster.restart("worker", 0)
        pid = first.pid
        os.kill(pid, signal.SIGKILL)
        replaced(first, pid)
    remove_logs(cluster.log_dir)


def test_a_worker_that_hangs_is_replaced():
    with kerasps.LocalCluster(num_workers=1, num_ps=1) as cluster:
        process = cluster.processes["worker", 0]
        pid = process.pid
        os.kill(pid, signal.SIGSTOP)
        # Said of the one before, and of a ps: nothing follows.
        task_watch_of(cluster).end_hung(Notice("hung", "worker", 0, process.started_at))
        task_watch_of(cluster).end_hung(Notice("hung", "ps", 0, time.monotonic()))
        assert all(process.is_running() for process in cluster.processes.values())
        task_watch_of(cluster).end_hung(Notice("hung", "worker", 0, time.monotonic()))
        replaced(process, pid)
    remove_logs(cluster.log_dir)


def test_without_restarts_a_worker_stays_as_it_is():
    with kerasps.LocalCluster(num_workers=2, num_ps=1, max_restarts=0) as cluster:
        first, second = (cluster.processes["worker", index] for index in range(2))
        task_watch_of(cluster).end_hung(Notice("hung", "worker", 0, time.monotonic()))
        os.kill(second.pid, signal.SIGKILL)
        wait_for(second.has_ended)
        time.sleep(0.2)
        assert first.is_running()
        assert second.has_ended()
        with pytest.warns(RuntimeWarning, match=r"closed: worker 1 \(signal SIGKILL\)"):
            cluster.close()
    remove_logs(cluster.log_dir)


def test_all_tasks_begin_anew_at_their_addresses():
    with kerasps.LocalCluster(num_workers=1, num_ps=1) as cluster:
        before = pids(cluster)
        os.kill(cluster.processes["ps", 0].pid, signal.SIGSTOP)
        cluster.restart_all()
        wait_until_reachable(cluster.description.server_addresses, timeout_s=EVER_S)
        assert not set(pids(cluster)) & set(before)
        assert not any(is_alive(pid) for pid in before)
        # They are watched again.
        process, pid = cluster.processes["worker", 0], cluster.processes["worker", 0].pid
        os.kill(pid, signal.SIGKILL)
        replaced(process, pid)
    remove_logs(cluster.log_dir)


@pytest.mark.parametrize(
    "delay_s",
    [
        *(0.01, 0.3),
        *(pytest.param(delay_s, marks=pytest.mark.matrix) for delay_s in (0, 0.002, 0.05)),
    ],
)
@pytest.mark.filterwarnings("ignore:Tasks of the cluster died:RuntimeWarning")
def test_a_cluster_can_be_closed_at_any_instant_of_a_restart(delay_s):
    cluster = kerasps.LocalCluster(num_workers=2, num_ps=1)
    addresses = cluster.description.addresses.values()
    for index in range(2):
        os.kill(cluster.processes["worker", index].pid, signal.SIGKILL)
    time.sleep(delay_s)
    cluster.close()
    cluster.close()
    assert not any(is_alive(pid) for pid in pids(cluster))
    assert all(is_free(address) for address in addresses)
    # Where the cluster has seen a death, it keeps them.
    if cluster.log_dir.exists():
        remove_logs(cluster.log_dir)


def test_an_interrupted_close_ends_the_tasks_at_once():
    cluster = kerasps.LocalCluster(num_workers=1, num_ps=1)
    # It gets three seconds to end, and does not.
    os.kill(cluster.processes["worker", 0].pid, signal.SIGSTOP)
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            cluster.close()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert not any(is_alive(pid) for pid in pids(cluster))
    assert all(is_free(address) for address in cluster.description.addresses.values())
    cluster.close()
    assert not cluster.log_dir.exists()


def remove_logs(log_dir):
    for path in log_dir.iterdir():
        path.unlink()
    log_dir.rmdir()


def test_a_restart_whose_port_is_taken_says_so():
    with kerasps.LocalCluster(num_workers=1, num_ps=1) as cluster:
        cluster.kill("worker", 0)
        address = cluster.processes["worker", 0].address
        with socket.socket() as intruder:
            # The one way to get at a held port: with the option that TensorFlow's server uses too.
            intruder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            intruder.bind(split_address(address))
            intruder.listen()
            with pytest.raises(TaskStartError) as caught:
                cluster.restart("worker", 0)
        message = str(caught.value)
        assert (caught.value.task_type, caught.value.task_index) == ("worker", 0)
        assert (
            f"worker 0 ended before it was ready. Expected: a server at {address}. Received:"
            in message
        )
        assert f"pid: {cluster.processes['worker', 0].pid}\n" in message
        assert "ended by: exit code 1" in message
        assert f"log file: {cluster.log_dir / 'worker-0.log'}" in message
        assert "RuntimeError: TensorFlow's server did not start. Expected: port" in message
        assert "Could not start gRPC server" in message
        assert cluster.processes["ps", 0].is_running()
        cluster.restart("worker", 0)
        assert is_listening(address)
    # The log belongs to an error that names it, so it outlives the cluster.
    assert (cluster.log_dir / "worker-0.log").exists()
    remove_logs(cluster.log_dir)


def test_a_start_that_fails_shows_the_last_lines_and_ends_the_others(
    monkeypatch, tmp_path, nothing_left
):
    broken = tmp_path / "broken"
    (broken / "tensorflow").mkdir(parents=True)
    (broken / "tensorflow" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(broken), prepend=os.pathsep)
    log_dir = tmp_path / "logs"
    with pytest.raises(TaskStartError) as caught:
        kerasps.LocalCluster(num_workers=2, num_ps=1, log_dir=log_dir)
    message = str(caught.value)
    assert "ended before it was ready" in message
    assert "last lines:" in message
    assert "No module named 'tensorflow.python" in message
    assert str(log_dir / f"{caught.value.task_type}-{caught.value.task_index}.log") in message


def test_a_start_that_takes_too_long_is_given_up(tmp_path):
    with pytest.raises(
        TaskStartError,
        match=r"(?s)worker 0 was not ready within start_timeout=0.05 s. .*state: still running",
    ) as caught:
        kerasps.LocalCluster(num_workers=1, num_ps=1, start_timeout=0.05)
    (kept,) = (tmp_path / "temporary").iterdir()
    assert str(kept / "worker-0.log") in str(caught.value)
    remove_logs(kept)


def test_a_forgotten_cluster_warns_and_is_closed():
    cluster = kerasps.LocalCluster(num_workers=1, num_ps=1)
    running = pids(cluster)
    clusters = [cluster]
    del cluster
    with pytest.warns(
        ResourceWarning,
        match=r"<LocalCluster num_workers=1 num_ps=1 open> was not closed. Use it in a `with`",
    ):
        clusters.clear()
    assert not any(is_alive(pid) for pid in running)


def test_an_exception_in_the_with_block_closes_the_cluster():
    with pytest.raises(ZeroDivisionError), kerasps.LocalCluster(num_workers=1, num_ps=1) as cluster:
        _ = 1 / 0
    assert not any(process.is_running() for process in cluster.processes.values())


KILLED_PARENT = """
import signal, sys, threading, time
import kerasps

clusters = []
make = lambda: clusters.append(kerasps.LocalCluster(num_workers=1, num_ps=1))
thread = threading.Thread(target=make)
thread.start()
thread.join()
# The thread that started the processes has ended; they must not.
time.sleep(1.5)
processes = clusters[0].processes.values()
print(*(process.pid for process in processes if process.is_running()), flush=True)
signal.pause()
"""


def test_processes_outlive_the_thread_that_started_them_but_not_the_parent(tmp_path, nothing_left):
    env = marked_environment(nothing_left, tmp_path, TMPDIR=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_PARENT], env=env, stdout=subprocess.PIPE, text=True
    ) as parent:
        running = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(running) == 2
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(is_alive(pid) for pid in running), what="the end of the orphans")


FORKED_PARENT = """
import os, signal
import kerasps

cluster = kerasps.LocalCluster(num_workers=1, num_ps=1)
forked = os.fork()
if forked == 0:
    signal.pause()
print(forked, *(process.pid for process in cluster.processes.values()), flush=True)
signal.pause()
"""


def test_processes_end_with_the_parent_although_a_fork_of_it_lives_on(tmp_path, nothing_left):
    env = marked_environment(nothing_left, tmp_path, TMPDIR=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", FORKED_PARENT], env=env, stdout=subprocess.PIPE, text=True
    ) as parent:
        forked, *running = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    try:
        wait_for(
            lambda: not any(is_alive(pid) for pid in running),
            what="the end of the orphans",
        )
        assert is_alive(forked)
    finally:
        os.kill(forked, signal.SIGKILL)
        wait_for(lambda: not is_alive(forked))


FORKED_COPY = """
import gc, os
import kerasps

with kerasps.LocalCluster(num_workers=1, num_ps=1) as cluster:
    for how in ("close", "forget"):
        forked = os.fork()
        if forked == 0:
            if how == "close":
                cluster.close()
            else:
                del cluster
                gc.collect()
            os._exit(0)
        assert os.waitpid(forked, 0)[1] == 0
    running = [process.is_running() for process in cluster.processes.values()]
    print(*running, cluster.log_dir.exists(), flush=True)
"""


def test_a_fork_of_the_parent_cannot_end_the_cluster(tmp_path, nothing_left):
    env = marked_environment(nothing_left, tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            *("-W", "error"),
            # Python 3.12 and later warn of every fork of a process with threads.
            *("-W", "ignore:This process:DeprecationWarning"),
            *("-c", FORKED_COPY),
        ],
        env=env,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True True\n", "")


def test_two_clusters_at_once_do_not_collide():
    with (
        kerasps.LocalCluster(num_workers=1) as first,
        kerasps.LocalCluster(num_workers=1) as second,
    ):
        addresses = [*first.description.addresses.values(), *second.description.addresses.values()]
        assert len(set(addresses)) == 6
        assert all(
            process.is_running()
            for cluster in (first, second)
            for process in cluster.processes.values()
        )


def test_a_cluster_on_one_processor_trains():
    script = Path(__file__).with_name("one_processor.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.stdout.split() == ["80", "True"], done.stderr


@pytest.mark.parametrize(("wanted", "threads"), [("1", 4), ("3", 4), ("4", 0), ("16", 0)])
def test_a_task_has_threads_for_requests_beside_a_call(monkeypatch, wanted, threads):
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", wanted)
    assert server._inter_op_threads() == threads


@pytest.mark.parametrize(
    ("num_workers", "host", "wanted", "threads"),
    [
        (1, "127.0.0.1", "", 0),
        (2, "127.0.0.1", "", 2),
        (3, "127.0.0.1", "", 1),
        (8, "127.0.0.1", "", 1),
        (2, "10.0.0.7", "", 0),
        (2, "127.0.0.1", "3", 0),
    ],
)
def test_workers_on_one_machine_share_its_cores(monkeypatch, num_workers, host, wanted, threads):
    """0 stands for TensorFlow's number."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(5))
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", wanted)
    workers = tuple(f"{host}:{port}" for port in range(1, num_workers + 1))
    jobs = {"chief": ("127.0.0.1:11",), "ps": (f"{host}:12",), "worker": workers}
    assert server._intra_op_threads(kerasps.ClusterDescription(jobs, "worker", 0)) == threads
    assert server._intra_op_threads(kerasps.ClusterDescription(jobs, "ps", 0)) == 0
