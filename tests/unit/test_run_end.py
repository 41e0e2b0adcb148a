"""The end of a run is told to its tasks, through real sockets."""

import socket
import threading
import time

import pytest

from kerasps.cluster.serving.run_end import RunEndWatch, announce_run_end, ask_run_end


def free_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return holder.getsockname()[1]


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_each_task_hears_the_exit_code(address):
    port, left = free_port(), []

    def announce():
        left.append(announce_run_end(address, port, 7, ["127.0.0.1"] * 2, timeout_s=20))

    thread = threading.Thread(target=announce)
    thread.start()
    heard = []
    while len(heard) < 2 and thread.is_alive():
        heard += [code for code in [ask_run_end(f"127.0.0.1:{port}")] if code is not None]
    thread.join()
    assert heard == [7, 7]
    assert left == [set()]


def test_who_has_not_asked_is_returned():
    assert announce_run_end("127.0.0.1", free_port(), 0, ["127.0.0.9"], timeout_s=0.1) == {
        "127.0.0.9"
    }


@pytest.mark.parametrize(
    "answer", [b"", b"\0\0\x12\x04\0\0\0\0\0", b"kerasps run ended 7", b"kerasps run ended 7\nx"]
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
        assert ask_run_end(f"127.0.0.1:{listener.getsockname()[1]}", timeout_s=1) is None
        thread.join()


def test_a_task_gives_up_without_a_chief():
    watch = RunEndWatch(free_port(), f"127.0.0.1:{free_port()}", timeout_s=0.2)
    assert not watch.is_over()
    deadline = time.monotonic() + 30
    while not watch.is_over():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert watch.exit_code == RunEndWatch.GIVEN_UP
