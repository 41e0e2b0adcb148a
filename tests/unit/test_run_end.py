"""The end of a run is told to its tasks, through real sockets."""

import contextlib
import functools
import http.client
import socket
import threading

import pytest

from kerasps.cluster.serving import run_end
from kerasps.cluster.serving.run_end import (
    CODE_OF_LOST,
    RunEndAnnouncer,
    RunEndWatch,
    wait_for_run_end,
)
from kerasps.runtime.addresses import split_address
from support.process_checks import EVER_S, reserved_address, wait_for

PS, WORKER = ("ps", 0), ("worker", 3)
ask_run_end = functools.partial(run_end.ask_run_end, timeout_s=EVER_S)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A task that asks may take as long as it likes."""
    monkeypatch.setattr(run_end, "_SILENT_S", EVER_S)
    monkeypatch.setattr(run_end._Answerer, "timeout", EVER_S)


@pytest.fixture
def free_port():
    """Returns ports that nobody else takes before the end of the test."""
    with contextlib.ExitStack() as held:

        def reserved():
            holder, address = reserved_address()
            held.enter_context(holder)
            return split_address(address)[1]

        yield reserved


def announced(address, port, code, tasks, timeout_s=EVER_S, waits_for=()):
    """The thread that announces, and what it returns, with the exit code."""
    left = []
    announcer = RunEndAnnouncer(address, port, code, tasks, waits_for=waits_for)

    def finish():
        with contextlib.closing(announcer):
            left.append((announcer.finish(timeout_s), announcer.code))

    thread = threading.Thread(target=finish)
    thread.start()
    return thread, left


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_each_task_hears_the_exit_code(free_port, address):
    port = free_port()
    thread, left = announced(address, port, 7, [PS, WORKER])
    chief = f"127.0.0.1:{port}"
    assert wait_for_run_end(chief, PS, timeout_s=EVER_S) == 7
    # Who is no task of the run hears it too, and is not waited for; nor is the first one twice.
    assert ask_run_end(chief, ("evaluator", 0)) == ask_run_end(chief, PS) == 7
    assert thread.is_alive()
    assert ask_run_end(chief, WORKER) == 7
    thread.join()
    assert left == [(set(), 7)]


def test_who_has_not_asked_is_returned(free_port):
    thread, left = announced("127.0.0.1", free_port(), 0, [PS], timeout_s=0.1)
    thread.join()
    assert left == [({PS}, 0)]


def test_ps_hear_nothing_until_workers_that_drive_have_ended(free_port):
    port, other = free_port(), ("worker", 4)
    chief = f"127.0.0.1:{port}"
    thread, left = announced("127.0.0.1", port, 0, [PS, WORKER, other], waits_for=[WORKER, other])
    assert ask_run_end(chief, PS) is ask_run_end(chief, WORKER) is None
    assert ask_run_end(chief, WORKER, ended_with=0) == 0
    assert ask_run_end(chief, PS) is ask_run_end(chief, other) is None
    assert ask_run_end(chief, other, ended_with=6) == 6
    assert ask_run_end(chief, PS) == 6
    thread.join()
    assert left == [(set(), 6)]


def test_a_failure_of_the_chief_is_told_to_workers_that_run(free_port):
    port = free_port()
    thread, left = announced("127.0.0.1", port, 5, [WORKER], waits_for=[WORKER])
    assert ask_run_end(f"127.0.0.1:{port}", WORKER) == 5
    thread.join()
    assert left == [(set(), 5)]


def test_whoever_is_no_task_does_not_count(free_port):
    port = free_port()
    with contextlib.closing(RunEndAnnouncer("127.0.0.1", port, 0, [PS])) as announcer:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/")
        with pytest.raises((OSError, http.client.HTTPException)):
            connection.getresponse()
        connection.close()
        assert announcer.finish(0.0) == {PS}


@pytest.mark.parametrize(
    "answer",
    [b"", b"\0\0\x12\x04\0\0\0\0\0", b"kerasps run: ended with 7", b"kerasps run: ended with 7\nx"],
)
def test_another_server_says_nothing(answer):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert ask_run_end(f"127.0.0.1:{listener.getsockname()[1]}", PS) is None
        thread.join()


def test_nobody_is_an_error(free_port):
    with pytest.raises(ConnectionRefusedError):
        ask_run_end(f"127.0.0.1:{free_port()}", PS)


def test_a_task_gives_up_without_a_chief(free_port):
    said, chief, port = [], f"127.0.0.1:{free_port()}", free_port()
    assert not RunEndWatch(chief, PS, port=port, timeout_s=EVER_S).is_over()
    watch = RunEndWatch(chief, PS, port=port, timeout_s=0.2, say=said.append)
    wait_for(watch.is_over)
    assert watch.exit_code == CODE_OF_LOST
    assert "gives up" in said[0]


def test_a_task_that_has_a_connection_asks_when_one_is_closed():
    with socket.socket() as server, socket.socket() as coordinator, socket.socket() as chief:
        for listener in (server, chief):
            listener.bind(("127.0.0.1", 0))
            listener.listen()
        coordinator.connect(server.getsockname())
        accepted, _ = server.accept()
        port = chief.getsockname()[1]
        chief.setblocking(False)
        watch = RunEndWatch(
            f"127.0.0.1:{port}", WORKER, port=server.getsockname()[1], timeout_s=EVER_S
        )
        for _ in range(3):
            assert not watch.is_over()
        with pytest.raises(BlockingIOError):  # nobody has asked
            chief.accept()
        coordinator.close()
        accepted.close()
        chief.close()
        thread, left = announced("127.0.0.1", port, 3, [WORKER])
        wait_for(watch.is_over)
        assert watch.exit_code == 3
        thread.join()
        assert left == [(set(), 3)]
