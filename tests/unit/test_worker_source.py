"""What the sessions of a worker pass on, from one to the next."""

from __future__ import annotations

from types import SimpleNamespace

from kerasps.training.sessions.session import WorkerSource


def opened(sources, generation):
    source = WorkerSource.of(sources, 3, generation)
    source.handles = []
    source.open(SimpleNamespace(resource=None))
    return source


def test_the_next_session_goes_on_with_what_is_open():
    sources = {}
    source = opened(sources, 1)
    assert WorkerSource.of(sources, 3, 1) is source
    assert WorkerSource.of(sources, 2, 1) is not source


def test_a_session_of_a_process_that_is_gone_closes_nothing_of_the_next():
    sources = {}
    stuck, after = opened(sources, 1), opened(sources, 2)
    stuck.close()  # its call returns only now
    assert after.is_open
    assert after.handles is not None
    assert WorkerSource.of(sources, 3, 2) is after
