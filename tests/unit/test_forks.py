"""Processes that are forked before they connect, as `multiprocessing` does, are as different as
processes that start by themselves.
"""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from kerasps.inputs import dataset_order
from kerasps.variables.names import NAMES


def name_of_a_resource(connection):
    connection.send(NAMES.claim("float32"))


def seeds_of_shuffles(connection):
    connection.send(dataset_order._process_seeds)


# Python warns of forks of a process with threads: TensorFlow has made some.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("made", [name_of_a_resource, seeds_of_shuffles])
def test_two_forks_and_their_parent_share_nothing(made):
    context = multiprocessing.get_context("fork")
    found = set()
    for _ in range(2):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=made, args=[sending])
        process.start()
        found.add(receiving.recv())
        process.join()
    receiving, sending = context.Pipe(duplex=False)
    made(sending)
    found.add(receiving.recv())
    assert len(found) == 3


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_gives_names_though_another_thread_held_the_lock():
    is_held, is_over = threading.Event(), threading.Event()

    def hold():
        with NAMES._lock:
            is_held.set()
            is_over.wait()

    threading.Thread(target=hold).start()
    is_held.wait()
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=name_of_a_resource, args=[sending])
    process.start()
    has_answered = receiving.poll(30)
    process.kill()
    is_over.set()
    assert has_answered
    assert receiving.recv().startswith("kerasps/")
    process.join()
