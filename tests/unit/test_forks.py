"""Processes that are forked before they connect, as `multiprocessing` does, are as different as
processes that start by themselves.
"""

from __future__ import annotations

import multiprocessing
import threading

import pytest

from kerasps.inputs import dataset_order
from kerasps.variables.storage.names import NAMES
from support.process_checks import PATIENCE_S

# Python warns of forks of a process with threads: TensorFlow has made some.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


def name_of_a_resource():
    return NAMES.claim("float32")


def seeds_of_shuffles():
    return dataset_order._process_seeds


def in_fork(function):
    """What a function returns in a fork of this process, which must answer."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sending.send(function()))
    process.start()
    try:
        assert receiving.poll(PATIENCE_S), "the fork does not answer"
        return receiving.recv()
    finally:
        process.kill()
        process.join()
        receiving.close()
        sending.close()


@pytest.mark.parametrize("made", [name_of_a_resource, seeds_of_shuffles])
def test_two_forks_and_their_parent_share_nothing(made):
    assert len({in_fork(made), in_fork(made), made()}) == 3


def test_a_fork_gives_names_though_another_thread_held_the_lock():
    is_held, is_over = threading.Event(), threading.Event()

    def hold():
        with NAMES._lock:
            is_held.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        assert in_fork(name_of_a_resource).startswith("kerasps/")
    finally:
        is_over.set()
        thread.join()
