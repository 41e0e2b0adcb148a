"""The end of a run is told to its tasks, through real sockets."""

import http.client
import socket
import threading
import time

import pytest

from kerasps.cluster.serving.run_end import (
    CODE_OF_LOST,
    RunEndAnnouncer,
    RunEndWatch,
    ask_run_end,
    wait_for_run_end,
)

PS, WORKER = ("ps", 0), ("worker", 3)


def free_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return holder.getsockname()[1]


def announced(address, port, code, tasks, timeout_s=20.0, waits_for=()):
    """The thread that announces, and what it returns, with the exit code."""
    left = []
    announcer = RunEndAnnouncer(address, port, code, tasks, waits_for=waits_for)

    def finish():
        with announcer:
            left.append((announcer.finish(timeout_s), announcer.code))

    thread = threading.Thread(target=finish)
    thread.start()
    return thread, left


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_each_task_hears_the_exit_code(address):
    port = free_port()
    thread, left = announced(address, port, 7, [PS, WORKER])
    chief = f"127.0.0.1:{port}"
    assert wait_for_run_end(chief, PS, timeout_s=20) == 7
    # Who is no task of the run hears it too, and is not waited for; nor is the first one twice.
    assert ask_run_end(chief, ("evaluator", 0)) == ask_run_end(chief, PS) == 7
    thread.join(0.5)
    assert left == []
    assert ask_run_end(chief, WORKER) == 7
    thread.join()
    assert left == [(set(), 7)]


def test_who_has_not_asked_is_returned():
    thread, left = announced("127.0.0.1", free_port(), 0, [PS], timeout_s=0.1)
    thread.join()
    assert left == [({PS}, 0)]


def test_ps_hear_nothing_until_workers_that_drive_have_ended():
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


def test_a_failure_of_the_chief_is_told_to_workers_that_run():
    port = free_port()
    thread, left = announced("127.0.0.1", port, 5, [WORKER], waits_for=[WORKER])
    assert ask_run_end(f"127.0.0.1:{port}", WORKER) == 5
    thread.join()
    assert left == [(set(), 5)]


def test_whoever_is_no_task_does_not_count():
    port = free_port()
    thread, left = announced("127.0.0.1", port, 0, [PS], timeout_s=3)
    deadline = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < deadline:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
            connection.request("GET", "/")
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
    assert left == [({PS}, 0)]


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
        assert ask_run_end(f"127.0.0.1:{listener.getsockname()[1]}", PS, timeout_s=1) is None
        thread.join()


def test_nobody_is_an_error():
    with pytest.raises(ConnectionRefusedError):
        ask_run_end(f"127.0.0.1:{free_port()}", PS)


def until_over(watch):
    deadline = time.monotonic() + 30
    while not watch.is_over():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_task_gives_up_without_a_chief():
    said = []
    watch = RunEndWatch(
        f"127.0.0.1:{free_port()}", PS, port=free_port(), timeout_s=0.2, say=said.append
    )
    assert not watch.is_over()
    until_over(watch)
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
        chief.settimeout(0.5)
        watch = RunEndWatch(f"127.0.0.1:{port}", WORKER, port=server.getsockname()[1], timeout_s=60)
        for _ in range(3):
            assert not watch.is_over()
        with pytest.raises(TimeoutError):
            chief.accept()
        coordinator.close()
        accepted.close()
        chief.close()
        thread, left = announced("127.0.0.1", port, 3, [WORKER])
        until_over(watch)
        assert watch.exit_code == 3
        thread.join()
        assert left == [(set(), 3)]
