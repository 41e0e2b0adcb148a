"""Pace: who may be given steps, whatever workers do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kerasps.training.epoch.pace import Pace

WORKERS = st.integers(0, 3)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("give"), WORKERS, st.integers(1, 5)),
        st.tuples(st.just("give"), WORKERS, st.integers(1, 5)),
        st.tuples(st.just("finish"), WORKERS, st.integers(1, 5)),
        st.tuples(st.just("take_back"), WORKERS, st.integers(1, 5)),
        st.tuples(st.just("join"), WORKERS, st.none()),
        st.tuples(st.just("leave"), WORKERS, st.none()),
    ),
    max_size=60,
)


@given(max_ahead=st.integers(1, 12), begin=st.sets(WORKERS), events=EVENTS)
def test_no_worker_gets_ahead_and_the_slowest_may_always_go_on(max_ahead, begin, events):
    pace = Pace(max_ahead)
    pace.begin(begin)
    # Where each worker stands that takes part: steps done, and steps given.
    done, given_to = dict.fromkeys(begin, 0), dict.fromkeys(begin, 0)
    for name, worker, steps in events:
        slowest = min(done.values(), default=0)
        match name:
            case "give":
                steps = min(steps, max_ahead)
                if not pace.allows(worker, steps):
                    assert given_to[worker] + steps > slowest + max_ahead
                    continue
                pace.give(worker, steps)
                done.setdefault(worker, slowest)
                given_to[worker] = given_to.get(worker, slowest) + steps
            case "finish" | "take_back":
                steps = min(steps, given_to.get(worker, 0) - done.get(worker, 0))
                getattr(pace, name)(worker, steps)
                if worker in done and name == "finish":
                    done[worker] += steps
                elif worker in done:
                    given_to[worker] -= steps
            case "join":
                pace.join(worker)
                done.setdefault(worker, slowest)
                given_to.setdefault(worker, slowest)
            case "leave":
                pace.leave(worker)
                done.pop(worker, None)
                given_to.pop(worker, None)
        lowest = min(done.values(), default=0)
        if name == "give":
            assert given_to[worker] <= lowest + max_ahead
        idle = [w for w in done if done[w] == given_to[w] == lowest]
        assert all(pace.allows(worker, max_ahead) for worker in idle)


def test_without_a_bound_everything_is_allowed():
    pace = Pace(None)
    pace.begin([0, 1])
    pace.give(0, 1000)
    assert pace.allows(0, 1000)
    pace.finish(1, 5)
    assert not pace.has_moved()


def test_it_tells_when_the_slowest_has_moved():
    pace = Pace(3)
    pace.begin([0, 1])
    assert not pace.has_moved()
    pace.give(0, 3)
    pace.finish(0, 3)
    assert not pace.has_moved()
    pace.leave(1)
    assert pace.has_moved()
    assert not pace.has_moved()
