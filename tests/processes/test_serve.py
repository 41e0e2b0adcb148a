"""`kerasps serve`: one task, as a scheduler would start it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from kerasps.runtime.addresses import split_address
from support.process_checks import (
    is_free,
    is_listening,
    listening_addresses,
    marked_environment,
    marked_processes,
    name_of,
    reserved_address,
    temporary_files,
    wait_for,
)

TRAINING = Path(__file__).with_name("served_training.py")
STARTING_ANEW = Path(__file__).with_name("starting_anew.py")


@pytest.fixture
def reserved():
    """Three ports that nothing else can take: the sockets that keep them, and their addresses."""
    reserved = [reserved_address() for _ in range(3)]
    yield reserved
    for holder, _ in reserved:
        holder.close()


@pytest.fixture
def cluster(reserved):
    """The addresses of a cluster whose ports nothing else can take."""
    return {
        job: [address]
        for job, (_, address) in zip(("chief", "worker", "ps"), reserved, strict=True)
    }


@pytest.fixture
def start(cluster, tmp_path):
    """Starts the task of the given type, and ends with nothing left behind."""
    mark = str(uuid.uuid4())
    started = []

    def start_task(task_type, *command, program=None, **variables):
        config = json.dumps({"cluster": cluster, "task": {"type": task_type, "index": 0}})
        env = marked_environment(mark, tmp_path, TF_CONFIG=config)
        env.pop("TF_CPP_MIN_LOG_LEVEL", None)
        process = subprocess.Popen(
            [sys.executable, *(program or ["-m", "kerasps", *(command or ("serve",))])],
            env=env | variables,
            # A scheduler gives no stdin: its end means nothing here.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_task
    for process in started:
        process.kill()
        process.communicate()
    assert marked_processes(mark) == {}
    assert temporary_files(tmp_path) == []


def lines_until_ready(process):
    seen = []
    for line in process.stderr:
        seen.append(line)
        if " listens on port " in line:
            return seen
    pytest.fail(f"the task ended with {process.wait()}: {''.join(seen)}")


def start_training(start, *arguments):
    """A coordinator that trains, and its lines from then on."""
    process = start("chief", program=[str(TRAINING), *arguments], KERAS_BACKEND="tensorflow")
    assert process.stdout.readline() == "TRAINS\n", process.communicate()
    return process


def steps_after(process, num_fits):
    """How many steps are done, after so many calls of `fit` more."""
    lines = [process.stdout.readline() for _ in range(num_fits)]
    assert lines[-1], process.communicate()
    return int(lines[-1].removeprefix("STEPS "))


@pytest.mark.parametrize("bind", ["127.0.0.1", pytest.param("0.0.0.0", marks=pytest.mark.matrix)])
def test_a_ps_holds_a_context_before_anyone_connects(start, bind):
    process = start("ps", "serve", f"--bind={bind}", TF_CPP_MIN_LOG_LEVEL="0")
    seen = lines_until_ready(process)
    # TensorFlow's own words, in the log of a task that nobody has connected to.
    assert any("eager service context" in line for line in seen), "".join(seen)
    assert not any("Warning" in line for line in seen), "".join(seen)


def megabytes(process):
    fields = dict(
        line.split(":") for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
    )
    return int(fields["VmRSS"].split()[0]) / 1024


def settled_megabytes(process):
    """What `megabytes` says once it has said the same twenty times."""
    seen = []

    def stands_still():
        seen.append(megabytes(process))
        return len(seen) >= 20 and len(set(seen[-20:])) == 1

    wait_for(stands_still, what="memory that stands still")
    return seen[-1]


@pytest.mark.parametrize(
    ("task_type", "number"),
    [
        *(("worker", signal.SIGTERM), ("ps", signal.SIGINT)),
        pytest.param("ps", signal.SIGTERM, marks=pytest.mark.matrix),
        pytest.param("worker", signal.SIGINT, marks=pytest.mark.matrix),
    ],
)
def test_a_task_serves_at_its_address_until_it_is_asked_to_end(start, cluster, task_type, number):
    (address,) = cluster[task_type]
    process = start(task_type)
    *others, line = lines_until_ready(process)
    # Of the library that has not set up its log yet there may be some.
    assert not any("eager service context" in other or "Started" in other for other in others)
    host, port = split_address(address)
    assert line == f"kerasps serve: {task_type} 0 listens on port {port} of {host}\n"
    assert is_listening(address)
    assert listening_addresses(process.pid) == {(host, port)}
    assert name_of(process.pid) == f"{task_type}-0"
    process.send_signal(number)
    out, err = process.communicate()
    assert (process.returncode, out, err) == (0, "", "")
    assert is_free(address)


def test_what_a_killed_coordinator_left_is_gone_before_the_next_one_comes(start):
    tasks = {job: start(job) for job in ("ps", "worker")}
    for task in tasks.values():
        lines_until_ready(task)
    # A task that has just begun to serve may still grow.
    empty = settled_megabytes(tasks["ps"])
    coordinator = start_training(start)
    assert steps_after(coordinator, 1) == 16
    # Nobody else's end is taken for the coordinator's.
    tasks["worker"].kill()
    tasks["worker"].wait()
    time.sleep(2)
    tasks["worker"] = start("worker")
    lines_until_ready(tasks["worker"])
    assert steps_after(coordinator, 3) == 64
    assert megabytes(tasks["ps"]) > empty + 256
    coordinator.kill()
    coordinator.wait()
    for job, task in tasks.items():
        assert f"has ended; {job} 0 restarts" in task.stderr.readline()
        lines_until_ready(task)
        assert task.poll() is None
    assert megabytes(tasks["ps"]) < empty + 50
    assert steps_after(start_training(start), 2) == 32


@contextlib.contextmanager
def taking(port):
    """Tries all the time to bind the port, in each way that a server may; yields what succeeded."""
    taken, is_over = [], threading.Event()
    ways = itertools.product(("127.0.0.1", "0.0.0.0"), (0, 1))

    def try_to_take():
        for host, reuse in itertools.cycle(ways):
            if is_over.is_set():
                return
            with socket.socket() as taker, contextlib.suppress(OSError):
                taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                taker.bind((host, port))
                taken.append((host, reuse))
            is_over.wait(0.0002)  # leaves the processor to the task

    thread = threading.Thread(target=try_to_take)
    thread.start()
    try:
        yield taken
    finally:
        is_over.set()
        thread.join()


def test_a_task_whose_coordinator_ended_is_empty_and_never_leaves_its_port(
    start, cluster, reserved
):
    tasks = {job: start(job) for job in ("ps", "worker")}
    for task in tasks.values():
        lines_until_ready(task)
    empty = settled_megabytes(tasks["ps"])
    # From here on, nobody but the tasks themselves keeps the ports.
    for holder, _ in reserved:
        holder.close()
    coordinator = start_training(start, "2")
    assert steps_after(coordinator, 2) == 32
    with taking(split_address(cluster["ps"][0])[1]) as taken:
        assert coordinator.wait() == 0
        for job, task in tasks.items():
            assert f"has ended; {job} 0 restarts" in task.stderr.readline()
            lines_until_ready(task)
    assert taken == []
    assert megabytes(tasks["ps"]) < empty + 50
    coordinator = start_training(start, "1")
    assert steps_after(coordinator, 1) == 16
    assert coordinator.wait() == 0


@pytest.mark.parametrize("bind", ["127.0.0.1", pytest.param("0.0.0.0", marks=pytest.mark.matrix)])
def test_a_task_that_starts_anew_keeps_its_port_each_time(start, reserved, bind):
    holder, address = reserved[2]
    process = start("ps", program=[str(STARTING_ANEW), bind])
    assert process.stdout.readline() == "SERVES\n", process.communicate()
    holder.close()
    with taking(split_address(address)[1]) as taken:
        # One that has started anew has to keep its port as the first one did.
        for _ in range(2):
            process.send_signal(signal.SIGUSR1)
            assert process.stdout.readline() == "SERVES\n", process.communicate()
    assert taken == []
    assert is_listening(address)
    process.kill()
    process.wait()
    assert is_free(address)


def test_a_port_that_is_taken_is_named(start, cluster):
    lines_until_ready(start("ps"))
    second = start("ps")
    _, err = second.communicate()
    port = cluster["ps"][0].rpartition(":")[2]
    assert second.returncode == 1
    assert (
        f"kerasps serve: error: TensorFlow's server did not start. Expected: port {port} of this "
        "machine to be free." in err
    )
    assert "Could not start gRPC server" in err
    assert "Traceback" not in err


def test_modules_with_custom_ops_are_imported_with_the_whole_of_tensorflow(start, tmp_path):
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "ops_a.py").write_text(
        "import sys, tensorflow as tf\nprint(tf.add.__name__, file=sys.stderr, flush=True)\n"
    )
    (modules / "ops_b.py").write_text("import sys\nprint('b', file=sys.stderr, flush=True)\n")
    root = [path for path in (str(modules), os.environ.get("PYTHONPATH"), os.getcwd()) if path]
    process = start("worker", KERASPS_FULL_IMPORT="ops_a, ops_b", PYTHONPATH=os.pathsep.join(root))
    lines = []
    for line in process.stderr:
        lines.append(line.strip())
        if "listens on port" in line:
            break
    assert [line for line in lines if line in ("add", "b")] == ["add", "b"]
    assert "listens on port" in lines[-1]


def test_env_tells_which_tasks_can_be_reached(start, cluster):
    lines_until_ready(start("ps"))
    out, _ = start("chief", "env").communicate()
    assert "TF_CONFIG: valid: 1 chief, 1 worker, 1 ps; this task is chief 0\n" in out
    assert f"  worker 0: {cluster['worker'][0]} not reachable (Connection refused)\n" in out
    assert f"  ps 0: {cluster['ps'][0]} reachable\n" in out
