import queue
import signal
import sys
import threading
import time

import pytest

from kerasps.runtime.inbox import Inbox
from support.process_checks import wait_for


def test_items_come_in_their_order():
    inbox = Inbox()
    inbox.put(1)
    inbox.put(2)
    assert not inbox.empty()
    assert [inbox.get(), inbox.get(1.0)] == [1, 2]
    assert inbox.empty()
    for timeout in 0.0, 0.01:
        with pytest.raises(queue.Empty):
            inbox.get(timeout)


def test_a_put_wakes_a_reader():
    inbox, got = Inbox(), []
    reader = threading.Thread(target=lambda: got.append(inbox.get(600.0)))
    reader.start()
    inbox.put("item")
    reader.join(600.0)
    assert got == ["item"]


def test_a_signal_whose_handler_lasts_longer_than_the_wait_does_not_make_it_endless():
    # `queue.SimpleQueue.get` waits for ever here.
    def handler(number, frame):
        time.sleep(0.1)  # longer than the wait: see above

    inbox, before = Inbox(), signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(queue.Empty):
            inbox.get(0.05)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def test_an_exception_of_a_signal_handler_leaves_the_inbox_usable():
    def handler(number, frame):
        raise KeyboardInterrupt

    main = threading.get_ident()

    def interrupt():
        wait_for(lambda: sys._current_frames()[main].f_code is Inbox.get.__code__, "the wait")
        signal.pthread_kill(main, signal.SIGALRM)

    inbox, before = Inbox(), signal.signal(signal.SIGALRM, handler)
    interrupter = threading.Thread(target=interrupt)
    try:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            inbox.get(600.0)
    finally:
        interrupter.join()
        signal.signal(signal.SIGALRM, before)
    inbox.put("item")
    assert inbox.get(1.0) == "item"
