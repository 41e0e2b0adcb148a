"""What a script tells its supervisor, and how often a task may be started again."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time

import pytest

from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.processes.process import child_environment
from kerasps.cluster.processes.restarts import RestartBudget
from kerasps.runtime.supervision import (
    SUPERVISOR_FD,
    Notice,
    SupervisorPipe,
    supervise_here,
    supervise_no_more,
    tell_connected,
    tell_supervisor,
)
from kerasps.tools.cli.scripts.script_process import idle_tasks

TELL = "from kerasps.runtime.supervision import tell_supervisor; tell_supervisor('hung', 'ps', 3)"
# A process that the script starts has all that it has, and is no coordinator of this cluster.
TELL_IN_CHILD = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {TELL!r}], close_fds=False, check=True)
"""
# As long as the script has not told anything, its children inherit the descriptor.
TELL_AND_LOOK = f"""
import os
{TELL}
fd = int(os.environ["{SUPERVISOR_FD}"].split(":")[0])
assert not os.get_inheritable(fd) and not os.get_blocking(fd)
"""


def run(program, pipe):
    subprocess.run(
        [sys.executable, "-c", program],
        env=child_environment(os.environ) | pipe.variables,
        pass_fds=[pipe.fd_to_pass],
        check=True,
    )
    pipe.has_been_passed()


@pytest.mark.parametrize("program", [TELL, TELL_AND_LOOK])
def test_a_script_tells_its_supervisor(program):
    before = time.monotonic()
    with contextlib.closing(SupervisorPipe()) as pipe:
        assert pipe.read() == []
        run(program, pipe)
        (notice,) = pipe.read()
        assert (notice.what, notice.task_type, notice.task_index) == ("hung", "ps", 3)
        # One clock for all processes of a machine.
        assert before < notice.time < time.monotonic()
        assert pipe.read() == []


def test_a_child_of_the_script_is_not_taken_for_it():
    with contextlib.closing(SupervisorPipe()) as pipe:
        run(TELL_IN_CHILD, pipe)
        assert pipe.read() == []


@pytest.mark.parametrize(
    "value", [None, "", "7", "a:b:c", "99999:1:{parent}", "0:{inode}:{parent}"]
)
def test_without_a_supervisor_nothing_happens(monkeypatch, value):
    monkeypatch.delenv(SUPERVISOR_FD, raising=False)
    if value is not None:
        inode = os.fstat(0).st_ino
        monkeypatch.setenv(SUPERVISOR_FD, value.format(parent=os.getppid(), inode=inode))
    tell_supervisor("lost", "ps", 0)


@pytest.fixture
def own_pipe(monkeypatch):
    """A pipe whose both ends are in this process."""
    with contextlib.closing(SupervisorPipe()) as pipe:
        fd, inode, _ = pipe.variables[SUPERVISOR_FD].split(":")
        monkeypatch.setenv(SUPERVISOR_FD, f"{fd}:{inode}:{os.getppid()}")
        yield pipe


def test_a_descriptor_that_is_another_file_by_now_is_left_alone(own_pipe, tmp_path):
    with (tmp_path / "file").open("wb") as file:
        os.dup2(file.fileno(), own_pipe.fd_to_pass)
        tell_supervisor("lost", "ps", 0)
    assert (tmp_path / "file").read_bytes() == b""


def test_neither_a_full_pipe_nor_a_closed_one_keeps_the_script(own_pipe):
    told = threading.Thread(
        target=lambda: [tell_supervisor("lost", "worker", index) for index in range(5000)],
        daemon=True,
    )
    told.start()
    told.join()
    first, *_ = own_pipe.read()
    assert (first.task_type, first.task_index) == ("worker", 0)
    os.close(own_pipe._read_fd)
    own_pipe._read_fd = -1
    tell_supervisor("lost", "worker", 0)


def test_lines_that_come_in_pieces_or_mean_nothing(own_pipe):
    os.write(
        own_pipe.fd_to_pass, b"nonsense\nlost chief 0 1.5\nlost ps x 1\n\xff\nlost ps 1 2.5\nhu"
    )
    assert own_pipe.read() == [Notice("lost", "ps", 1, 2.5)]
    os.write(own_pipe.fd_to_pass, b"ng worker 0 3.5\n")
    assert own_pipe.read() == [Notice("hung", "worker", 0, 3.5)]


def test_a_supervisor_in_this_process_goes_first(own_pipe):
    heard, others = [], []
    supervise_here(heard.append)
    tell_supervisor("hung", "worker", 1)
    supervise_no_more(others.append)
    tell_supervisor("lost", "ps", 0)
    supervise_no_more(heard.append)
    tell_supervisor("lost", "ps", 1)
    assert [(notice.task_type, notice.task_index) for notice in heard] == [("worker", 1), ("ps", 0)]
    assert [notice.task_index for notice in own_pipe.read()] == [1]


def test_a_script_tells_where_it_has_a_strategy(own_pipe):
    supervise_here(print)  # the launcher hears it also from a script with a LocalCluster
    try:
        tell_connected(elsewhere=True)
        tell_connected(elsewhere=False)
    finally:
        supervise_no_more(print)
    told = [(notice.what, notice.task_type) for notice in own_pipe.read()]
    assert told == [("elsewhere", "chief"), ("connected", "chief")]


@pytest.mark.parametrize(
    ("strategies", "driven", "expected"),
    [
        ({"connected", "elsewhere"}, False, None),
        (set(), False, "made no strategy of kerasps.*beside 2 workers and 1 ps.*ParameterServerS"),
        (set(), True, "made no strategy of kerasps.*beside 1 ps without work.*WorkerDrivenS"),
        ({"elsewhere"}, False, "trained on a `LocalCluster`.*beside 2 workers and 1 ps without"),
    ],
)
def test_a_script_without_a_strategy_leaves_tasks_idle(strategies, driven, expected):
    jobs = {"chief": ["h:1"], "worker": ["h:2", "h:3"], "ps": ["h:4"]}
    line = idle_tasks(strategies, ClusterDescription(jobs, "chief", 0), driven=driven)
    assert line == expected or re.search(expected, line)


def test_pauses_grow_up_to_a_limit_and_an_hour_forgets():
    budget = RestartBudget(9)
    task = ("worker", 0)
    pauses = [budget.grant(task, 100.0 + index).pause_s for index in range(9)]
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert budget.grant(task, 110.0) is None
    assert not budget.has_left(task, 3699.9)
    assert budget.has_left(task, 3700.0)
    assert str(budget.grant(task, 3700.0)) == "started again in 30 s, 9 of 9 in this hour"
    assert budget.grant(task, 3700.5) is None
    assert str(budget.grant(("worker", 1), 110.0)) == "started again, 1 of 9 in this hour"


@pytest.mark.parametrize(
    ("max_restarts", "words"),
    [
        (0, "restarts are turned off"),
        (1, "1 restart within an hour"),
        (2, "2 restarts within an hour"),
    ],
)
def test_why_a_task_is_not_started_again(max_restarts, words):
    assert RestartBudget(max_restarts).refusal() == f"not started again: {words}"
