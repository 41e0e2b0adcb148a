"""Bounded admission: who may be given steps, whatever workers do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kerasps.strategy_arguments import AdmissionTerms
from kerasps.training.epoch.admission import Bounded, Free, Synchronous, choose_admission

WORKERS = st.integers(0, 3)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("give"), WORKERS, st.integers(1, 5)),
        st.tuples(st.just("give"), WORKERS, st.integers(1, 5)),
        st.tuples(st.just("finish"), WORKERS, st.integers(1, 5)),
        st.tuples(st.just("take_back"), WORKERS, st.integers(1, 5)),
        st.tuples(st.just("set_ready"), WORKERS, st.none()),
        st.tuples(st.just("set_idle"), WORKERS, st.none()),
    ),
    max_size=60,
)


def allows(admission, worker, steps):
    return admission.allows(worker, steps, is_idle=False, readers=list)


@given(max_ahead=st.integers(1, 12), begin=st.sets(WORKERS), events=EVENTS)
def test_no_worker_gets_ahead_and_the_slowest_may_always_go_on(max_ahead, begin, events):
    bounded = Bounded(max_ahead)
    bounded.begin(begin)
    # Where each worker stands that takes part: steps done, and steps given.
    done, given_to = dict.fromkeys(begin, 0), dict.fromkeys(begin, 0)
    for name, worker, steps in events:
        slowest = min(done.values(), default=0)
        match name:
            case "give":
                steps = min(steps, max_ahead)
                if not allows(bounded, worker, steps):
                    assert given_to[worker] + steps > slowest + max_ahead
                    continue
                bounded.give(worker, steps)
                done.setdefault(worker, slowest)
                given_to[worker] = given_to.get(worker, slowest) + steps
            case "finish" | "take_back":
                steps = min(steps, given_to.get(worker, 0) - done.get(worker, 0))
                getattr(bounded, name)(worker, steps)
                if worker in done and name == "finish":
                    done[worker] += steps
                elif worker in done:
                    given_to[worker] -= steps
            case "set_ready":
                bounded.set_ready(worker)
                done.setdefault(worker, slowest)
                given_to.setdefault(worker, slowest)
            case "set_idle":
                bounded.set_idle(worker)
                done.pop(worker, None)
                given_to.pop(worker, None)
        lowest = min(done.values(), default=0)
        if name == "give":
            assert given_to[worker] <= lowest + max_ahead
        idle = [w for w in done if done[w] == given_to[w] == lowest]
        assert all(allows(bounded, worker, max_ahead) for worker in idle)


def test_without_a_bound_everything_is_allowed():
    free = choose_admission(AdmissionTerms())
    assert isinstance(free, Free)
    free.begin([0, 1])
    before = free.progress
    free.give(0, 1000)
    assert allows(free, 0, 1000)
    free.finish(1, 5)
    assert free.progress == before


def test_its_progress_changes_when_the_slowest_has_moved():
    bounded = choose_admission(AdmissionTerms(max_ahead=3))
    assert isinstance(bounded, Bounded)
    bounded.begin([0, 1])
    before = bounded.progress
    bounded.give(0, 3)
    bounded.finish(0, 3)
    assert bounded.progress == before
    bounded.set_idle(1)
    assert bounded.progress != before
    assert bounded.progress == bounded.progress


def test_a_training_has_one_admission():
    assert isinstance(choose_admission(AdmissionTerms(joins=True, num_backups=1)), Synchronous)
