"""`kerasps run` on one machine: all tasks end with the run, and tell how it ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from support.forked_scripts import is_alive
from support.process_checks import (
    is_listening,
    marked_environment,
    marked_processes,
    reserved_address,
    wait_for,
)
from support.runs import Tasks

RESTARTED = Path(__file__).with_name("restarted_training.py")
SIDECAR = Path(__file__).with_name("sidecar_training.py")
EPOCHS, STEPS = 6, 20
# Whoever waits for a task gives up; the limit is that for the start of the run, too.
GIVES_UP = ["--start-timeout", "60"]
WAITING = """
import os, pathlib, sys, time
import keras, kerasps
strategy = kerasps.ParameterServerStrategy()
pathlib.Path("connected").touch()
while not os.path.exists("end"): time.sleep(0.05)
sys.exit(int(pathlib.Path("end").read_text()))
"""
DRIVEN = """
import os, pathlib, signal, sys, time
import keras, numpy as np, kerasps
strategy = kerasps.WorkerDrivenStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
def batches(context):
    import tensorflow as tf
    x = tf.ones([8, 1])
    return tf.data.Dataset.from_tensors((x, x)).repeat()
class Dies(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        dead = pathlib.Path("dead")
        if not strategy.is_chief and batch == 3 and not dead.exists():
            dead.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while strategy.is_chief and batch == 19 and not dead.exists():
            time.sleep(0.05)  # the other may be so late that all would be over
model.fit(kerasps.DatasetCreator(batches), epochs=2, steps_per_epoch=20, verbose=0,
          callbacks=[Dies()])
print("DONE", strategy.is_chief, flush=True)
sys.exit(int(sys.argv[1]) if strategy.is_chief else 0)
"""


FORKING = """
import json, os, pathlib, signal, socket, subprocess, sys, time
host, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["chief"][0].split(":")
server = socket.socket()
# As TensorFlow's does.
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind((host, int(port)))
server.listen()
if not os.path.exists("children"):
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # It serves where no other does, and inherits no socket.
    listens = [sys.executable, "-m", "http.server", port, "--bind", "127.0.0.8"]
    program = subprocess.Popen(listens, start_new_session=True, **silent)
    ends = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:  # a daemon, whose parent is soon another
            os.write(ends[1], str(os.getpid()).encode())
            time.sleep(3600)
        os._exit(0)
    os.wait()
    pathlib.Path("children").write_text(f"{program.pid} {os.read(ends[0], 99).decode()}")
    os.kill(os.getpid(), signal.SIGKILL)
print("listens")
"""


class Run(Tasks):
    """The nodes of a run, each a process on this machine."""

    def __init__(self, tmp_path):
        super().__init__(tmp_path, "chief-0")
        self.mark = str(uuid.uuid4())
        self.holders = []
        self.stranger = None

    def reserve(self, **numbers):
        """Take a port for each task, which nothing else can have."""
        jobs = {}
        for job, number in numbers.items():
            held = [reserved_address() for _ in range(number)]
            self.holders += [holder for holder, _ in held]
            jobs[job] = [address for _, address in held]
        self.hosts = ";".join(f"{job}={','.join(tasks)}" for job, tasks in jobs.items())

    def reserve_one_port(self, hosts):
        """Take one port at several addresses, and listen on it at another as a stranger."""
        port, self.stranger, address = 0, socket.socket(), "127.0.0.9"
        self.stranger.bind((address, port))
        port = self.stranger.getsockname()[1]
        for host in hosts.values():
            held = socket.socket()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, port))
            self.holders.append(held)
        self.stranger.close()
        self.stranger = subprocess.Popen(
            [sys.executable, "-m", "http.server", str(port), "--bind", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(lambda: is_listening(f"{address}:{port}"), what="the stranger")
        jobs = {}
        for (job, _), host in hosts.items():
            jobs.setdefault(job, []).append(f"{host}:{port}")
        self.hosts = ";".join(f"{job}={','.join(tasks)}" for job, tasks in jobs.items())

    def start(self, role, index, script, *args, options=(), **variables):
        name = f"{role}-{index}"
        place = ["--hosts", self.hosts, "--role", role, "--index", str(index), *options]
        self.start_command(name, ["run", *place, str(script), *map(str, args)], **variables)

    def start_command(self, name, command, **variables):
        variables = {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"} | variables
        env = marked_environment(self.mark, self.here, **variables)
        with (self.here / f"{name}.log").open("a") as log:
            self.tasks[name] = subprocess.Popen(
                [sys.executable, "-m", "kerasps", *command],
                env=env,
                cwd=self.here,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Signals of a test are for one of them.
                start_new_session=True,
            )

    def start_all(self, script, *args, num_workers=1, options=(), **variables):
        self.reserve(chief=1, ps=1, worker=num_workers)
        for role, number in (("ps", 1), ("worker", num_workers), ("chief", 1)):
            for index in range(number):
                self.start(role, index, script, *args, options=options, **variables)

    def script(self, text):
        (self.here / "script.py").write_text(text)
        return "script.py"

    def wait_for_file(self, name):
        chief = self.tasks["chief-0"]
        wait_for(
            lambda: (self.here / name).exists() or chief.poll() is not None, what=f"file {name}"
        )
        assert chief.poll() is None, self.logs()

    def log(self, name):
        return (self.here / f"{name}.log").read_text()

    def close(self):
        for process in (*self.tasks.values(), *([self.stranger] if self.stranger else [])):
            process.kill()
            process.wait()
        # A script ends with the command that started it.
        wait_for(lambda: marked_processes(self.mark) == {}, "the end of all processes")
        for holder in self.holders:
            holder.close()


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.close()


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.matrix), 7])
def test_all_end_with_the_exit_code_of_the_script(run, code):
    run.start_all(run.script(WAITING), num_workers=2)
    run.wait_for_file("connected")
    (run.here / "end").write_text(str(code))
    run.check_codes(code)
    for name in ("ps-0", "worker-0", "worker-1"):
        assert f"the run has ended with exit code {code}" in run.log(name)
        # None of them took the end for a loss. A task may see that the script's process has ended
        # before the node listens in its place; it says so, and starts again.
        early = run.log(name).count(f"has ended; {name.replace('-', ' ')} restarts")
        assert run.log(name).count("this is") == 1 + early, run.logs()
    assert "kerasps run: this is chief 0 of 1 chief, 2 workers, 1 ps" in run.log("chief-0")


def test_a_script_that_never_connects_ends_the_run_too(run):
    run.start_all(run.script("raise ValueError('an error of its own')"))
    run.check_codes(1)
    assert run.log("chief-0").count("an error of its own") == 2  # the line, and the message


def test_a_run_goes_on_without_a_worker_its_script_and_its_ps(run):
    run.hold(0, 1, 4)
    run.start_all(RESTARTED, run.here, EPOCHS, STEPS, num_workers=2)
    run.wait_for_epoch(0)
    # It hands back its work, and nothing starts again.
    run.tasks["worker-1"].terminate()
    run.release(0)
    assert run.tasks["worker-1"].wait() == 143
    run.start("worker", 1, RESTARTED)
    run.wait_for_epoch(1)
    assert len(run.events("started")) == 1
    script = run.events("started")[-1]["pid"]
    os.kill(script, signal.SIGKILL)
    wait_for(lambda: not is_alive(script), what="the end of the script")
    run.release(1)
    run.wait_for_epoch(4)
    # What starts in its place has the last backup.
    run.tasks["ps-0"].kill()
    run.tasks["ps-0"].wait()
    run.release(4)
    run.start("ps", 0, RESTARTED)
    run.check_codes(0)
    run.check_exact(EPOCHS * STEPS, starts=3)
    assert "ps 0 restarts" in run.log("ps-0")
    told = run.log("chief-0")
    assert "When the script has ended, the run is started again" in told or "lost ps 0" in told
    # Each task has its number of restarts.
    assert told.count("The run is started again, 1 of 3 in this hour") == 2, told


def test_a_run_whose_ps_stays_away_ends_with_a_code_to_try_again(run):
    run.hold(1)
    run.start_all(RESTARTED, run.here, EPOCHS, STEPS, options=GIVES_UP)
    run.wait_for_epoch(1)
    run.tasks["ps-0"].kill()
    run.tasks["ps-0"].wait()
    run.release(1)
    run.check_codes(138, "chief-0", "worker-0")


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.matrix)],
)
def test_a_chief_told_to_end_ends_all(run, number, code):
    run.start_all(run.script(WAITING))
    run.wait_for_file("connected")
    run.tasks["chief-0"].send_signal(number)
    run.check_codes(code)


@pytest.mark.matrix
@pytest.mark.parametrize("silent", ["ps-0", "worker-0"])
def test_a_chief_told_to_end_while_a_task_is_silent_ends_within_the_grace(run, silent):
    run.hold(2)
    run.start_all(RESTARTED, run.here, EPOCHS, STEPS, num_workers=1)
    run.wait_for_epoch(2)
    run.tasks[silent].send_signal(signal.SIGSTOP)
    run.tasks["chief-0"].terminate()
    run.release(2)
    run.check_codes(143, *(name for name in run.tasks if name != silent))


def test_a_chief_that_is_gone_is_waited_for(run):
    run.hold(2)
    run.start_all(RESTARTED, run.here, EPOCHS, STEPS)
    run.wait_for_epoch(2)
    run.tasks["chief-0"].kill()
    run.tasks["chief-0"].wait()
    run.release(2)
    run.start("chief", 0, RESTARTED, run.here, EPOCHS, STEPS)
    run.check_codes(0)
    run.check_exact(EPOCHS * STEPS, starts=2)


@pytest.mark.matrix
def test_a_chief_that_stays_away_is_given_up(run):
    run.start_all(run.script(WAITING), options=GIVES_UP)
    run.wait_for_file("connected")
    run.tasks["chief-0"].kill()
    run.check_codes(138, "ps-0", "worker-0")
    assert "gives up" in run.log("ps-0")


@pytest.mark.matrix
def test_an_evaluator_ends_with_the_run(run):
    run.reserve(chief=1, ps=1, worker=1, evaluator=1)
    run.hosts, _, _ = run.hosts.rpartition(";evaluator")
    for role in ("ps", "worker", "evaluator", "chief"):
        run.start(role, 0, SIDECAR, run.here, "plain")
    run.check_codes(0)
    for name in ("chief-0", "evaluator-0"):
        (report,) = (line for line in run.log(name).splitlines() if line.startswith("REPORT "))
        assert json.loads(report.removeprefix("REPORT "))


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.matrix), 5])
def test_workers_drive_and_the_first_ends_the_run(run, code):
    run.reserve(ps=1, worker=2)
    script = run.script(DRIVEN)
    for role, index in (("ps", 0), ("worker", 1), ("worker", 0)):
        run.start(role, index, script, code, options=["--mode", "worker"])
    assert run.codes("worker-0", "ps-0") == {"worker-0": code, "ps-0": code}, run.logs()
    # The other one may have been done before it could hear of a failure.
    assert run.codes("worker-1")["worker-1"] in (0, code), run.logs()
    assert "DONE True" in run.log("worker-0")
    assert "the script died (signal SIGKILL): started again" in run.log("worker-1")


@pytest.mark.parametrize("by_run", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_served_tasks_end_with_their_chief(run, by_run):
    """Whoever starts the script: its exit code is known where `kerasps run` does."""
    run.reserve(chief=1, ps=1, worker=1)
    cluster = {
        job: tasks.split(",")
        for job, _, tasks in (part.partition("=") for part in run.hosts.split(";"))
    }
    config = {
        role: json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}})
        for role in cluster
    }
    for role in ("ps", "worker"):
        run.start_command(f"{role}-0", ["serve", "--exit-with-chief"], TF_CONFIG=config[role])
    script = run.script(WAITING)
    if by_run:
        run.start_command("chief-0", ["run", script], TF_CONFIG=config["chief"])
    else:
        env = marked_environment(
            run.mark, run.here, TF_CONFIG=config["chief"], KERAS_BACKEND="tensorflow"
        )
        run.tasks["chief-0"] = subprocess.Popen(
            [sys.executable, script], env=env, cwd=run.here, stdin=subprocess.DEVNULL
        )
    run.wait_for_file("connected")
    (run.here / "end").write_text("6")
    assert run.tasks["chief-0"].wait() == 6
    run.check_codes(6 if by_run else 0, "ps-0", "worker-0")


def test_one_port_everywhere_and_the_command_given_twice(run):
    """Strangers and other tasks listen on the chief's port, at other addresses."""
    run.reserve_one_port(
        {
            ("chief", 0): "127.0.0.1",
            ("ps", 0): "127.0.0.2",
            ("worker", 0): "127.0.0.3",
            ("worker", 1): "127.0.0.4",
        }
    )
    script = run.script(WAITING)
    for role, index in (("ps", 0), ("worker", 0), ("worker", 1), ("chief", 0)):
        run.start(role, index, script)
    run.wait_for_file("connected")
    place = ["--hosts", run.hosts, "--role", "chief"]
    run.start_command("twice", ["run", *place, script])
    assert run.tasks.pop("twice").wait() == 1
    told = run.log("twice")
    address = run.hosts.partition("=")[2].partition(";")[0]
    assert f"The port of the chief, {address}, is in use by another process" in told
    # It has told nobody that the run has ended.
    assert all(process.poll() is None for process in run.tasks.values()), run.logs()
    (run.here / "end").write_text("0")
    run.check_codes(0)
    assert "did not ask for the end" not in run.log("chief-0")
    assert "without work" not in run.log("chief-0")
    assert run.stranger.poll() is None


def test_a_fork_that_keeps_the_port_is_ended_and_a_program_is_not(run):
    run.reserve_one_port(
        {("chief", 0): "127.0.0.1", ("ps", 0): "127.0.0.2", ("worker", 0): "127.0.0.3"}
    )
    script = run.script(FORKING)
    for role in ("ps", "worker", "chief"):
        run.start(role, 0, script)
    run.check_codes(0)
    program, daemon = map(int, (run.here / "children").read_text().split())
    try:
        assert "listens\n" in run.log("chief-0")
        assert "the script made no strategy of kerasps" in run.log("chief-0")
        assert f"processes {daemon}, which the script had forked, held its port" in run.logs()
        assert not is_alive(daemon)
        assert is_alive(program)
        assert run.stranger.poll() is None
    finally:
        os.kill(program, signal.SIGKILL)


def test_a_missing_script_ends_the_run(run):
    run.start_all("missing.py")
    run.check_codes(2)
    assert "There is no such script" in run.log("chief-0")
    for name in ("ps-0", "worker-0"):
        assert "the run has ended with exit code 2" in run.log(name)
