"""The state of an epoch, by lists of events: steps counted are steps asked, whatever is lost."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasps.strategy_arguments import AdmissionTerms
from kerasps.training.epoch.admission import choose_admission
from kerasps.training.epoch.epoch_events import (
    ClusterGrew,
    Collect,
    EpochBegan,
    Execution,
    ExecutionsDone,
    Open,
    PassBegan,
    Report,
    ResultCollected,
    ResultReturned,
    ResultsWanted,
    Send,
    SessionBegan,
    SessionEnded,
    SplitOpened,
    SplitPosition,
    StepsAsked,
    WorkerEnd,
    WorkerEnded,
    WorkerLeaves,
)
from kerasps.training.epoch.epoch_state import EpochState
from kerasps.training.epoch.splits import SplitStatus

AHEAD = 3
NUM_PS = 2


def new_state(num_workers=2, *, num_splits=None, lost=(), interval=1.0, max_ahead=None):
    state = EpochState(
        num_workers,
        lost=lost,
        executions_ahead=AHEAD if interval else 1,
        collect_interval=interval,
        admission=choose_admission(AdmissionTerms(max_ahead=max_ahead)),
    )
    assert state.handle(PassBegan(num_workers if num_splits is None else num_splits)) == []
    assert state.handle(EpochBegan()) == []
    return state


def reading_state(*lefts, **kwargs):
    """A state whose workers have each opened their split, with so many batches left in it."""
    state = new_state(len(lefts), **kwargs)
    for worker, left in enumerate(lefts):
        assert state.handle(SessionBegan(worker, False)) == [Open(worker, worker, 0)]
        assert state.handle(SplitOpened(worker, left)) == ([] if left != 0 else [Report()])
    return state


def ask(state, *sizes):
    """Ask for executions of so many steps; return those sent, as (worker, number of steps)."""
    commands = [c for n in sizes for c in state.handle(StepsAsked(Execution(n, None)))]
    return [(c.worker, c.execution.num_steps) for c in commands if isinstance(c, Send)]


def lost(worker, applied=()):
    """The session of a worker has failed."""
    return WorkerEnded(worker, WorkerEnd.FAILED, applied)


def died(worker, applied=()):
    """A worker has died that had no session."""
    return WorkerEnded(worker, WorkerEnd.DIED, applied)


def restarted(worker, applied):
    """The session of a worker begins without the dataset that it had."""
    return SessionBegan(worker, False, WorkerEnded(worker, WorkerEnd.RESTARTED, applied))


def kinds(commands):
    return [type(command) for command in commands]


# One thing at a time


def test_executions_go_to_the_least_busy_worker_until_each_has_enough():
    state = reading_state(None, None)
    assert ask(state, *[5] * 7) == [(0, 5), (1, 5), (0, 5), (1, 5), (0, 5), (1, 5)]
    assert state.num_in_flight == 7
    assert state.handle(ExecutionsDone(1, 1, at=0.5))[-1].worker == 1
    assert state.num_in_flight == 6


def test_results_are_collected_at_intervals():
    state = reading_state(None, interval=10.0)
    ask(state, 5, 5, 5)
    assert kinds(state.handle(ExecutionsDone(0, 1, at=100.0))) == [Report, Collect]
    assert kinds(state.handle(ExecutionsDone(0, 1, at=100.1))) == [Report]  # asked for already
    assert state.handle(ResultCollected(0, 10, "sum", at=100.2)) == [Report(0, "sum", pushes=10)]
    assert kinds(state.handle(ExecutionsDone(0, 1, at=110.1))) == [Report]
    assert state.workers.has_results_due
    assert state.handle(ResultsWanted()) == [Collect(0)]
    assert state.handle(ResultsWanted()) == []
    state.handle(ResultCollected(0, 5, "sum", at=110.2))
    assert not state.workers.has_results_due


class Numbered:
    """A header: the number of the first step."""

    def __init__(self, first):
        self.first = first

    def after(self, num_steps):
        return Numbered(self.first + num_steps)


def test_what_is_left_of_a_split_is_done_in_sizes_for_which_there_are_graphs():
    state = reading_state(7, None)
    missing, *sent = state.handle(StepsAsked(Execution(10, Numbered(20), sizes=(10, 5, 1))))
    assert missing.missing_steps == 3
    parts = [(c.worker, c.execution.num_steps, c.execution.header.first) for c in sent]
    assert parts == [(0, 5, 20), (0, 1, 25), (0, 1, 26)]
    assert state.splits[0].left == 0


def test_batches_that_travel_go_with_the_steps_that_are_cut_off():
    parts = Execution(3, Numbered(4), ["a", "b", "c"], first_batch=6, sizes=(2, 1)).cut(3)
    assert [(part.num_steps, part.header.first) for part in parts] == [(2, 4), (1, 6)]
    assert [(part.batches, part.first_batch) for part in parts] == [(["a", "b"], 6), (["c"], 8)]


def test_what_was_applied_in_part_is_done_again_in_one_go():
    (part,) = Execution(9, Numbered(0), applied=(2, 3), sizes=(10, 1)).cut(5)
    assert (part.num_steps, part.applied) == (5, (2, 3))


def test_what_a_lost_worker_held_is_sent_first_and_in_order():
    state = reading_state(None, interval=10.0)
    executions = [Execution(1, number) for number in range(5)]
    for execution in executions:
        state.handle(StepsAsked(execution))
    state.handle(ExecutionsDone(0, 1, at=0.0))
    state.handle(ResultCollected(0, 1, "sum", at=0.1))
    state.handle(ExecutionsDone(0, 1, at=0.2))
    assert kinds(state.handle(lost(0))) == [Report]
    state.handle(SessionBegan(0, False))
    commands = state.handle(SplitOpened(0, None))
    commands += state.handle(ExecutionsDone(0, 1, at=0.3))
    sent = [c.execution.header for c in commands if isinstance(c, Send)]
    assert sent == [1, 2, 3, 4]


def test_a_worker_that_takes_two_batches_at_a_time_pushes_once_for_both():
    state = new_state(2, num_splits=0)
    for worker, replicas in enumerate((2, 1)):
        state.handle(SessionBegan(worker, False, replicas=replicas))
        state.handle(SplitOpened(worker, None))
    (sent,) = state.handle(StepsAsked(Execution(5, None)))
    assert (sent.worker, sent.execution.replicas, sent.execution.num_pushes) == (0, 2, 3)
    assert ask(state, 4, 5) == [(1, 4), (0, 5)]
    state.handle(ExecutionsDone(0, 1, at=0.0))
    report = next(c for c in state.handle(ResultCollected(0, 5, "sum", at=0.1)) if c.result)
    assert (report.missing_steps, report.pushes) == (0, 3)
    # Of its second execution, one ps has two pushes, the other one.
    (again,) = (c for c in state.handle(lost(0, (5, 4))) if isinstance(c, Send))
    assert (again.worker, again.execution.applied) == (1, (2, 1))
    # In the same pushes, though this worker takes one batch at a time.
    assert (again.execution.num_steps, again.execution.replicas) == (5, 2)


def test_what_no_ps_has_of_a_lost_worker_is_done_as_its_next_worker_does():
    state = new_state(2, num_splits=0)
    for worker, replicas in enumerate((2, 1)):
        state.handle(SessionBegan(worker, False, replicas=replicas))
        state.handle(SplitOpened(worker, None))
    state.handle(StepsAsked(Execution(4, None)))
    (again,) = (c for c in state.handle(lost(0, (0, 0))) if isinstance(c, Send))
    assert (again.worker, again.execution.applied, again.execution.replicas) == (1, (), 1)


def test_what_was_applied_in_part_is_done_before_anything_else_on_its_batches():
    state = new_state(2, interval=10.0, max_ahead=5)
    state.handle(SessionBegan(0, False))
    state.handle(SplitOpened(0, None))
    assert ask(state, 4, 4, 1) == [(0, 4)]
    state.handle(ExecutionsDone(0, 1, at=0.0))
    state.handle(SessionEnded(0))
    # It was lost meanwhile, and is back; its split had a single batch.
    assert state.handle(restarted(0, (1, 1))) == [Open(0, 0, 0)]
    assert state.handle(SplitOpened(0, None)) == []
    # It may not do the four steps again before the other goes on, but one more step it might.
    state.handle(SessionBegan(1, False))
    sent = state.handle(SplitOpened(1, None))
    assert [(c.worker, c.execution.num_steps) for c in sent] == [(1, 4), (1, 1)]
    (again,) = (c for c in state.handle(ExecutionsDone(1, 1, at=0.1)) if isinstance(c, Send))
    assert (again.worker, again.execution.num_steps, again.execution.applied) == (0, 4, (1, 1))


def test_a_worker_that_joins_takes_over_half_of_what_another_has_left():
    state = reading_state(100, 120)
    assert ask(state, 2, 2) == [(0, 2), (1, 2)]
    state.handle(ClusterGrew(4))
    # Of split 1, 118 batches are not given out.
    assert state.handle(SessionBegan(2, False)) == [Open(2, 1, 61)]
    assert state.handle(SessionBegan(3, False)) == [Open(3, 0, 51)]
    assert state.handle(SplitOpened(2, 59)) == []
    assert state.splits[1].left == 59
    assert not state.splits.all_given_out
    assert Open(0, 1, 61) not in state.handle(lost(2)), "who has its own reads that first"
    assert state.handle(SessionBegan(2, False)) == [Open(2, 1, 61)]


def test_so_little_that_it_is_not_worth_it_is_not_taken_over():
    state = reading_state(15)
    assert ask(state, 2) == [(0, 2)]
    state.handle(ClusterGrew(2))
    assert state.handle(SessionBegan(1, False)) == [Report()]
    # Nor is what lies far behind what was read.
    state = reading_state(1000)
    ask(state, *[300] * 3)
    state.handle(ExecutionsDone(0, 3, at=0.1))
    ask(state, 1)
    state.handle(ClusterGrew(2))
    assert state.handle(SessionBegan(1, False)) == [Report()]


def test_who_comes_back_to_find_its_split_taken_helps_with_it():
    state = reading_state(3, 100)
    assert ask(state, 3) == [(0, 3)]
    state.handle(lost(1))
    state.handle(ExecutionsDone(0, 1, at=2.0))
    assert Open(0, 1, 0) in state.handle(ResultCollected(0, 3, "sum", at=2.0))
    state.handle(SplitOpened(0, 100))
    ask(state, 1)
    assert state.handle(SessionBegan(1, False)) == [Open(1, 1, 51)]


def test_data_in_no_order_are_not_taken_over():
    state = new_state(1)
    state.handle(SessionBegan(0, False))
    state.handle(SplitOpened(0, 100, has_order=False))
    state.handle(ClusterGrew(2))
    assert state.handle(SessionBegan(1, False)) == [Report()]


def test_a_pass_with_divided_splits_is_resumed():
    state = reading_state(100)
    state.handle(ClusterGrew(2))
    assert state.handle(SessionBegan(1, False)) == [Open(1, 0, 50)]
    state.handle(SplitOpened(1, 50))
    assert ask(state, 4, 4) == [(0, 4), (1, 4)]
    for worker in range(2):
        state.handle(ExecutionsDone(worker, 1, at=2.0))
        state.handle(ResultCollected(worker, 4, "sum", at=2.0))
    assert state.splits.positions == [SplitPosition(0, 4, 50), SplitPosition(0, 54, 100)]
    again = EpochState(1, executions_ahead=AHEAD, collect_interval=1.0)
    again.handle(PassBegan(1, tuple(state.splits.positions)))
    again.handle(EpochBegan())
    assert again.handle(SessionBegan(0, False)) == [Open(0, 0, 4)]
    again.handle(SplitOpened(0, 96))
    assert again.splits[0].left == 46
    ask(again, 46)
    again.handle(ExecutionsDone(0, 1, at=2.0))
    assert Open(0, 0, 54) in again.handle(ResultCollected(0, 46, "sum", at=2.0))


def test_a_worker_that_joins_shares_data_that_never_end():
    state = new_state(2)
    for worker in range(2):
        state.handle(SessionBegan(worker, False))
    state.handle(ClusterGrew(3))
    assert state.handle(SessionBegan(2, False)) == [Report()]
    assert state.handle(SplitOpened(0, None, is_endless=True)) == [Open(2, 0, 0)]
    state.handle(SplitOpened(2, None, is_endless=True))
    assert ask(state, 1, 1) == [(0, 1), (2, 1)]
    # The split stays with its first reader when the second is lost.
    state.handle(lost(2))
    assert state.splits[0].status is SplitStatus.TAKEN


# Anything in any order


@dataclass
class Worker:
    """What a worker's thread and the worker would do, without either."""

    mailbox: deque = field(default_factory=deque)
    has_session: bool = False
    split: int | None = None
    is_open: bool = False
    place: int = 0
    running: int = 0
    num_steps: int = 0
    # How many of its pushes each ps has applied.
    pushed: list = field(default_factory=lambda: [0] * NUM_PS)
    # The examples of executions whose results it holds.
    held: list = field(default_factory=list)


class Cluster:
    """Workers of which anything can happen, and the loop of `fit`'s thread."""

    def __init__(
        self,
        lengths,
        *,
        interval,
        per_execution,
        is_known=False,
        steps=None,
        travels=False,
        is_endless=False,
        begins_again=False,
        max_ahead=None,
    ):
        # How many passes have begun, and whether another begins within the epoch.
        self.passes, self.begins_again = 1, begins_again and sum(lengths) > 0
        self.is_endless = is_endless
        self.lengths, self.is_known, self.keeps = lengths, is_known, interval > 0
        self.per_execution = min(per_execution, max_ahead or per_execution)
        self.steps, self.travels = steps, travels
        count = len(lengths)
        self.state = new_state(
            count, num_splits=0 if travels else count, interval=interval, max_ahead=max_ahead
        )
        self.workers = [Worker() for _ in range(count)]
        self.reports, self.now = deque(), 0.0
        self.asked = self.done = self.given_out = 0
        self.counted = Counter()
        # What each ps has applied; a worker may be lost in the middle of a step.
        self.applied = [Counter() for _ in range(NUM_PS)]
        self.random = random.Random(0)
        # Whether the epoch is over, and whether `fit` waits for a report.
        self.is_over = self.is_waiting = False

    def post(self, event):
        self.now += 0.1
        self.hand_out(event)
        for index, worker in enumerate(self.workers):
            if worker.has_session and self.state.workers.is_drained(index):
                worker.has_session = False
                self.hand_out(WorkerEnded(index, WorkerEnd.LEFT, tuple(worker.pushed)))
                self.hand_out(SessionEnded(index))
                self.workers[index] = Worker()
                self.hand_out(died(index, tuple(worker.pushed)))

    def hand_out(self, event):
        commands = self.state.handle(event)
        self.state.validate()
        for command in commands:
            if isinstance(command, Report):
                self.reports.append(command)
                self.is_waiting = False
            else:
                assert self.workers[command.worker].has_session, "nobody carries this out"
                self.workers[command.worker].mailbox.append(command)

    # fit's thread

    def loop(self):
        """What `fit`'s thread does until it has to wait."""
        while not self.is_over and not self.is_waiting:
            while self.has_room() and (size := self.next_size()):
                first = self.given_out if self.travels else 0
                batches = list(range(first, first + size)) if self.travels else None
                sizes = self.random.choice([(), (self.per_execution, 1)])
                for part in Execution(size, Numbered(0), batches, first, sizes=sizes).cut(size):
                    self.post(StepsAsked(part))
                self.given_out += size
                self.asked += size
            if self.settle():
                if self.begins_again and self.state.num_in_flight:
                    self.begin_pass()
                    continue
                self.is_over = True
                return
            if not self.reports:
                self.is_waiting = True
                return
            report = self.reports.popleft()
            self.asked -= report.missing_steps
            if report.result is not None:
                self.check_place(report)
                self.counted.update(report.result)
                self.done += len(report.result)

    def begin_pass(self):
        assert self.counted == Counter(dict.fromkeys(self.examples(), self.passes))
        self.passes += 1
        self.post(PassBegan(len(self.lengths)))

    def examples(self):
        return [(split, i) for split, length in enumerate(self.lengths) for i in range(length)]

    def check_place(self, report):
        """A result that returns alone says which batches it is of."""
        if self.keeps or self.is_endless:
            return
        places = range(report.first_batch, report.first_batch + len(report.result))
        said = places if self.travels else [(report.split, place) for place in places]
        assert report.result == list(said)

    def next_size(self):
        left = self.per_execution if self.steps is None else self.steps - self.asked
        if self.travels:
            left = min(left, sum(self.lengths) - self.given_out)
        return min(self.per_execution, left)

    def has_room(self):
        wants = self.steps is None or self.asked < self.steps
        return wants and self.state.num_in_flight < AHEAD * len(self.workers)

    def settle(self):
        if self.state.num_in_flight and not self.state.workers.is_exhausted:
            return False
        self.post(ResultsWanted())
        return not self.state.workers.has_results_due and not self.reports

    # A worker's thread

    def begin(self, index):
        worker = self.workers[index]
        if not worker.has_session:
            worker.has_session = True
            if worker.is_open:
                self.post(SessionBegan(index, True))
                return
            applied = tuple(worker.pushed)
            worker.pushed = [0] * NUM_PS
            self.post(restarted(index, applied))

    def carry_out(self, index):
        worker = self.workers[index]
        if not worker.has_session:
            return
        if not worker.mailbox:
            self.report_done(index, 0)
            return
        match worker.mailbox.popleft():
            case Open(split=split, skip=skip):
                worker.split, worker.place, worker.is_open = split, skip, True
                known = self.is_known and split is not None
                left = self.lengths[split] - skip if known else None
                self.post(SplitOpened(index, left, is_endless=self.is_endless))
            case Send(execution=execution):
                self.run(index, execution)
            case Collect():
                self.report_done(index, 0)
                result, worker.held = worker.held, []
                self.post(ResultCollected(index, len(result), result, at=self.now))

    def run(self, index, execution, *, is_cut=False):
        """Does an execution, or some of its steps, the last one on some ps only."""
        worker = self.workers[index]
        if execution.batches is not None:
            examples = execution.batches[: execution.num_steps]
        else:
            end = worker.place + execution.num_steps
            length = self.lengths[worker.split]
            assert end <= length or not self.is_known, "it reads beyond the end"
            end = min(end, length)
            examples = [(worker.split, place) for place in range(worker.place, end)]
            worker.place = end
        num_done = self.random.randint(0, len(examples)) if is_cut else len(examples)
        for place, example in enumerate(examples):
            for ps in range(NUM_PS):
                is_there = place < num_done or (
                    is_cut and place == num_done and self.random.random() < 0.5
                )
                if is_there and place >= (execution.applied or [0] * NUM_PS)[ps]:
                    self.applied[ps][example] += 1
                    worker.pushed[ps] += 1
        if is_cut:
            return
        worker.num_steps += len(examples)
        if self.keeps:
            worker.held += examples
            worker.running += 1
            self.report_done(index, AHEAD - 1)
        else:
            self.post(ResultReturned(index, len(examples), examples))

    def report_done(self, index, still_running):
        worker = self.workers[index]
        if worker.running > still_running:
            count, worker.running = worker.running - still_running, still_running
            self.post(ExecutionsDone(index, count, at=self.now))

    # What may happen at any time

    def lose(self, index, *, is_silent=False):
        """The worker is killed; silent: where it has no session, nobody notices for now."""
        worker = self.workers[index]
        had_session = worker.has_session
        if had_session and worker.mailbox and isinstance(worker.mailbox[0], Send):
            self.run(index, worker.mailbox[0].execution, is_cut=True)
        # One that nobody noticed is noticed when its next session begins.
        is_noticed = had_session or not is_silent
        self.workers[index] = Worker() if is_noticed else Worker(pushed=worker.pushed)
        if had_session:
            self.post(lost(index, tuple(worker.pushed)))
        elif not is_silent:
            self.post(died(index, tuple(worker.pushed)))

    def lose_silently(self, index):
        self.lose(index, is_silent=True)

    def leave(self, index):
        """The worker is told to leave; a new one may come to its place."""
        self.post(WorkerLeaves(index))

    def join(self):
        if len(self.workers) < 6:
            self.workers.append(Worker())
            self.post(ClusterGrew(len(self.workers)))

    def begin_epoch(self):
        """The next epoch, in the same pass over the data."""
        self.end_flight()
        self.post(EpochBegan())
        self.asked = self.done = 0
        self.reports.clear()
        self.is_over = self.is_waiting = False

    def end_flight(self):
        """All sessions end; what is in a mailbox is not carried out."""
        for index, worker in enumerate(self.workers):
            if worker.has_session:
                self.report_done(index, 0)
                worker.mailbox.clear()
                worker.has_session = False
                self.post(SessionEnded(index))
        self.check()

    def check(self):
        assert self.state.num_in_flight >= 0
        # Two workers that share data without an end read the same.
        if not self.is_endless:
            most = max(self.counted.values(), default=0)
            assert most <= self.passes, "something was counted twice"
            for applied in self.applied:
                most = max(applied.values(), default=0)
                assert most <= self.passes, "a ps applied a step twice"

    def finish(self, *, is_one_gone=False):
        """Let the rest go well, on all workers or all but the first; then nothing is due."""
        gone = {0} if is_one_gone and len(self.lengths) > 1 else set()
        for index in gone:
            self.begin(index)
            self.lose(index)
        for index in range(len(self.workers)):
            if index not in gone:
                self.begin(index)
        for _ in range(10_000):
            self.loop()
            if self.is_over:
                return
            for index in range(len(self.workers)):
                if index not in gone:
                    self.begin(index)
                    self.carry_out(index)
        raise AssertionError("it never ends")


WORKERS = st.integers(0, 3)
# Of long ones, workers that join take over some.
LENGTHS = st.lists(st.integers(0, 25) | st.integers(60, 200), min_size=1, max_size=4)
ACTIONS = st.one_of(
    st.tuples(st.just("begin"), WORKERS),
    st.tuples(st.just("carry_out"), WORKERS),
    st.tuples(st.just("carry_out"), WORKERS),
    st.tuples(st.just("carry_out"), WORKERS),
    st.tuples(st.just("loop"), WORKERS),
    st.tuples(st.just("lose"), WORKERS),
    st.tuples(st.just("lose_silently"), WORKERS),
    st.tuples(st.just("leave"), WORKERS),
    st.tuples(st.just("join"), WORKERS),
    st.tuples(st.just("end_flight"), WORKERS),
)
# How a cluster reads, and how often it is asked.
SIZES = {
    "interval": st.sampled_from([0.0, 0.3, 100.0]),
    "per_execution": st.integers(1, 7),
    "max_ahead": st.none() | st.integers(1, 9),
}
# Hypothesis draws short lists by itself.
ACTION_LISTS = st.one_of(st.lists(ACTIONS, max_size=30), st.lists(ACTIONS, min_size=60))


def play(cluster, actions):
    for name, index in actions:
        index %= len(cluster.workers)
        getattr(cluster, name)(*([] if name in ("loop", "join", "end_flight") else [index]))
        cluster.check()


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS,
    options=st.fixed_dictionaries({**SIZES, "is_known": st.booleans(), "travels": st.booleans()}),
    is_one_gone=st.booleans(),
    actions=ACTION_LISTS,
)
def test_every_example_of_a_finite_pass_is_counted_once(lengths, options, is_one_gone, actions):
    cluster = Cluster(lengths, **options)
    play(cluster, actions)
    cluster.finish(is_one_gone=is_one_gone)
    expected = range(sum(lengths)) if options["travels"] else cluster.examples()
    assert cluster.counted == Counter(expected)
    assert cluster.applied == [Counter(expected)] * NUM_PS


@settings(max_examples=150, deadline=None)
@given(
    num_workers=st.integers(1, 4),
    options=st.fixed_dictionaries({**SIZES, "is_endless": st.booleans()}),
    steps=st.integers(0, 60),
    actions=ACTION_LISTS,
)
def test_steps_counted_are_steps_asked_and_steps_applied(num_workers, options, steps, actions):
    cluster = Cluster([10**6] * num_workers, steps=steps, **options)
    play(cluster, actions)
    cluster.finish()
    assert cluster.done == steps
    assert [applied.total() for applied in cluster.applied] == [steps] * NUM_PS
    assert cluster.state.num_in_flight == 0
    assert not cluster.state.workers.has_results_due


@settings(max_examples=200, deadline=None)
@given(
    lengths=LENGTHS,
    options=st.fixed_dictionaries({**SIZES, "is_known": st.booleans()}),
    steps=st.integers(1, 20) | st.integers(20, 60),
    begins_again=st.booleans(),
    is_one_gone=st.booleans(),
    epochs=st.lists(ACTION_LISTS, min_size=1, max_size=4),
)
def test_epochs_go_on_where_the_one_before_ended_in_one_pass_or_several(
    lengths, options, steps, begins_again, is_one_gone, epochs
):
    """A pass begins within an epoch when every example of the last one is counted."""
    cluster = Cluster(lengths, steps=steps, begins_again=begins_again, **options)
    left = sum(lengths)
    for actions in epochs:
        play(cluster, actions)
        cluster.finish(is_one_gone=is_one_gone)
        assert cluster.done == (steps if cluster.begins_again else min(steps, left))
        assert cluster.applied == [cluster.counted] * NUM_PS
        left -= cluster.done
        cluster.begin_epoch()
    if not begins_again:
        assert sum(cluster.counted.values()) == sum(lengths) - left
    least = min((cluster.counted[example] for example in cluster.examples()), default=0)
    assert least >= max(cluster.counted.values(), default=0) - 1


# Bounded admission

QUIET_ACTIONS = st.one_of(
    st.tuples(st.just("begin"), WORKERS),
    st.tuples(st.just("carry_out"), WORKERS),
    st.tuples(st.just("carry_out"), WORKERS),
    st.tuples(st.just("loop"), WORKERS),
    st.tuples(st.just("end_flight"), WORKERS),
)


@settings(max_examples=150, deadline=None)
@given(
    num_workers=st.integers(1, 4),
    options=st.fixed_dictionaries({**SIZES, "travels": st.booleans()}),
    max_ahead=st.integers(1, 9),
    actions=st.lists(QUIET_ACTIONS, min_size=30),
)
def test_no_worker_is_more_steps_ahead_of_the_slowest_than_it_may(
    num_workers, options, max_ahead, actions
):
    options |= {"max_ahead": max_ahead}
    cluster = Cluster([10**6] * num_workers, steps=10**5, **options)
    # However one worker is preferred to another.
    for name, index in actions:
        index = min(index, num_workers - 1)
        for _ in range(3):
            play(cluster, [("loop", 0), (name, index)])
            steps = [worker.num_steps for worker in cluster.workers]
            assert max(steps) - min(steps) <= max_ahead
    slowest = min(steps)
    for _ in range(3 * AHEAD):
        play(cluster, [(n, i) for i in range(num_workers) for n in ("begin", "loop", "carry_out")])
    assert min(worker.num_steps for worker in cluster.workers) > slowest, "they stand still"


@pytest.mark.parametrize("event", [lost(1), WorkerLeaves(1)], ids=["is lost", "leaves"])
def test_nobody_waits_for_a_worker_that(event):
    state = reading_state(None, None, max_ahead=1)
    assert ask(state, 1, 1, 1) == [(0, 1), (1, 1)]
    state.handle(ExecutionsDone(0, 1, at=0.1))
    assert [c.worker for c in state.handle(event) if isinstance(c, Send)] == [0]
