"""Who takes part in synchronous updates: nobody waits for who has nothing to bring."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kerasps.training.epoch.admission import Synchronous
from kerasps.training.epoch.epoch_events import (
    AllAsked,
    Collect,
    EpochBegan,
    Execution,
    ExecutionsDone,
    Join,
    JoinedUpdates,
    Leave,
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
    StepsAsked,
    WorkerEnd,
    WorkerEnded,
)
from kerasps.training.epoch.epoch_state import EpochState

AHEAD = 3


class Cluster:
    """Workers that come to joints, of which anything can happen in any order."""

    executions_ahead, collect_interval = AHEAD, 0.2

    def __init__(self, lengths, per_execution, seed):
        self.lengths, self.per_execution = lengths, per_execution
        self.random = random.Random(seed)
        self.state = EpochState(
            len(lengths),
            executions_ahead=self.executions_ahead,
            collect_interval=self.collect_interval,
            admission=Synchronous(),
        )
        self.mailboxes = [deque() for _ in lengths]
        self.has_session, self.is_open = [False] * len(lengths), [False] * len(lengths)
        self.place = [0] * len(lengths)
        self.split = [None] * len(lengths)
        # Of each worker: steps left of the execution that runs, and what it has done since.
        self.left, self.held = [None] * len(lengths), [0] * len(lengths)
        # Pushes that the ps has applied since the session began, and those that come again, which
        # it does not apply or count.
        self.pushed, self.again = [0] * len(lengths), [0] * len(lengths)
        self.members, self.arrived = set(), set()
        self.sizes, self.counted, self.losses, self.now = [], 0, 0, 0.0
        self.hand_out(PassBegan(len(lengths)))
        self.hand_out(EpochBegan())

    def hand_out(self, event):
        self.now += 0.1
        commands = self.state.handle(event)
        self.state.validate()
        for command in commands:
            if isinstance(command, Report):
                self.counted += command.result or 0
            else:
                self.mailboxes[command.worker].append(command)

    def ask(self):
        while (
            self.state.num_in_flight < AHEAD * len(self.lengths)
            and not self.state.workers.is_exhausted
        ):
            self.hand_out(StepsAsked(Execution(self.per_execution, None)))

    def settle_joint(self):
        if self.arrived and self.members <= self.arrived:
            self.sizes.append(len(self.arrived))
            self.arrived.clear()

    def act(self, worker):
        """Do the next thing that a worker, or its session, can do; return whether there was one."""
        if not self.has_session[worker]:
            self.has_session[worker] = True
            self.hand_out(SessionBegan(worker, self.is_open[worker]))
            return True
        if worker in self.arrived:
            return False  # it waits for the others
        if self.left[worker]:
            assert worker in self.members
            self.left[worker] -= 1
            self.arrived.add(worker)
            if self.again[worker]:
                self.again[worker] -= 1
            else:
                self.pushed[worker] += 1
            self.settle_joint()
            return True
        if self.left[worker] == 0:
            self.left[worker] = None
            self.finish(worker)
            return True
        if not self.mailboxes[worker]:
            return False
        match self.mailboxes[worker].popleft():
            case Open(split=split, skip=skip):
                self.hand_out(SplitOpened(worker, self.lengths[split] - skip))
            case Join():
                self.members.add(worker)
                self.hand_out(JoinedUpdates(worker))
            case Leave():
                self.members.discard(worker)
                self.settle_joint()
            case Send(execution=execution):
                self.left[worker] = execution.num_steps
                self.held[worker] += execution.num_steps
                self.again[worker] = execution.applied[0] if execution.applied else 0
            case Collect():
                steps, self.held[worker] = self.held[worker], 0
                self.hand_out(ResultCollected(worker, steps, steps, at=self.now))
        return True

    def finish(self, worker):
        self.hand_out(ExecutionsDone(worker, 1, at=self.now))

    def lose(self, worker):
        if self.has_session[worker]:
            self.losses += 1
            self.members.discard(worker)
            self.arrived.discard(worker)
            self.settle_joint()
            self.mailboxes[worker].clear()
            self.left[worker], self.held[worker] = None, 0
            pushed, self.pushed[worker], self.again[worker] = self.pushed[worker], 0, 0
            self.has_session[worker] = self.is_open[worker] = False
            self.hand_out(WorkerEnded(worker, WorkerEnd.FAILED, (pushed,)))

    def act_in_any_order(self):
        order = self.random.sample(range(len(self.lengths)), len(self.lengths))
        return any(self.act(worker) for worker in order)

    def run(self, lose_at=frozenset()):
        """Go on until all is counted."""
        for turn in range(100_000):
            if turn in lose_at:
                self.lose(self.random.randrange(len(self.lengths)))
            self.ask()
            if not self.act_in_any_order():
                if self.state.workers.is_exhausted and not self.state.workers.has_results_due:
                    return
                self.hand_out(AllAsked())
                self.hand_out(ResultsWanted())
                assert any(self.mailboxes), "everybody waits for somebody"
        raise AssertionError("it never ends")


class ListeningCluster(Cluster):
    """One whose loop has callbacks that listen to batches, and touch the model now and then."""

    executions_ahead, collect_interval = 1, 0.0

    def __init__(self, lengths, per_execution, seed):
        self.asked, self.reports = 0, deque()
        super().__init__(lengths, per_execution, seed)

    def hand_out(self, event):
        commands = self.state.handle(event)
        self.state.validate()
        for command in commands:
            if isinstance(command, Report):
                self.reports.append(command)
            else:
                self.mailboxes[command.worker].append(command)

    def finish(self, worker):
        steps, self.held[worker] = self.held[worker], 0
        self.hand_out(ResultReturned(worker, steps, steps))

    def ask(self):
        """Send as `Loop` does."""
        most = (len(self.lengths) - 1) * self.per_execution
        while (ahead := self.asked - self.counted) <= most and not self.state.workers.is_exhausted:
            if ahead and self.state.is_dealt_evenly:
                break
            self.hand_out(StepsAsked(Execution(self.per_execution, None)))
            self.asked += self.per_execution

    def tell(self):
        report = self.reports.popleft()
        self.asked -= report.missing_steps
        self.counted += report.result or 0

    def suspend(self):
        self.hand_out(AllAsked())
        while self.state.num_in_flight and not self.state.workers.is_exhausted:
            assert self.act_in_any_order(), "a callback waits for ever"
        for worker, has_session in enumerate(self.has_session):
            if has_session:
                self.hand_out(SessionEnded(worker))
                self.members.discard(worker)
                self.mailboxes[worker].clear()
                # It begins again with its dataset open.
                self.is_open[worker], self.has_session[worker] = True, False

    def run(self, lose_at=frozenset(), touch_at=frozenset()):
        for turn in range(100_000):
            if turn in lose_at:
                self.lose(self.random.randrange(len(self.lengths)))
            self.ask()
            has_acted = self.act_in_any_order()
            if self.reports and (not has_acted or self.random.random() < 0.5):
                self.tell()
                if turn in touch_at:
                    self.suspend()
            elif not has_acted:
                assert self.state.workers.is_exhausted, "everybody waits for somebody"
                return
        raise AssertionError("it never ends")


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    per_execution=st.integers(1, 7),
    seed=st.integers(0, 10**6),
    lose_at=st.frozensets(st.integers(0, 300), max_size=6),
)
# A worker is lost, and then another that was to do its executions again.
@example(lengths=[11, 12, 7, 13], per_execution=2, seed=22, lose_at=frozenset([101, 112]))
def test_everything_is_counted_and_nobody_waits_for_ever(lengths, per_execution, seed, lose_at):
    cluster = Cluster(lengths, per_execution, seed)
    cluster.run(lose_at)
    assert cluster.counted == sum(lengths)
    if not cluster.losses:
        assert sum(cluster.sizes) == sum(lengths)


@settings(max_examples=50, deadline=None)
@given(
    num_workers=st.integers(1, 4),
    length=st.integers(1, 40),
    per_execution=st.integers(1, 7),
    seed=st.integers(0, 10**6),
)
def test_all_take_part_in_each_update_where_all_have_as_many_batches(
    num_workers, length, per_execution, seed
):
    cluster = Cluster([length] * num_workers, per_execution, seed)
    cluster.run()
    assert cluster.sizes == [num_workers] * length


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    per_execution=st.integers(1, 7),
    seed=st.integers(0, 10**6),
    lose_at=st.frozensets(st.integers(0, 300), max_size=6),
    touch_at=st.frozensets(st.integers(0, 300), max_size=20),
)
def test_so_it_is_where_callbacks_listen(lengths, per_execution, seed, lose_at, touch_at):
    cluster = ListeningCluster(lengths, per_execution, seed)
    cluster.run(lose_at, touch_at)
    assert cluster.counted == sum(lengths)


@settings(max_examples=50, deadline=None)
@given(
    num_workers=st.integers(1, 4),
    num_executions=st.integers(1, 12),
    per_execution=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    touch_at=st.frozensets(st.integers(0, 200), max_size=40),
)
def test_a_callback_that_touches_the_model_cuts_no_update_short(
    num_workers, num_executions, per_execution, seed, touch_at
):
    length = num_executions * per_execution
    cluster = ListeningCluster([length] * num_workers, per_execution, seed)
    cluster.run(touch_at=touch_at)
    assert cluster.sizes == [num_workers] * length


def test_steps_are_dealt_out_evenly():
    admission = Synchronous()
    admission.begin([0, 1])
    admission.join(0)
    assert not admission.allows(0, 4, is_idle=True, readers=lambda: [0, 1])  # the other is expected
    admission.join(1)
    admission.give(0, 4)
    assert not admission.allows(0, 4, is_idle=False, readers=lambda: [0, 1])
    assert admission.allows(1, 4, is_idle=False, readers=lambda: [0, 1])
    # All wait for one that has nothing to do; and one that has no data is given nothing.
    assert admission.allows(0, 4, is_idle=True, readers=lambda: [0, 1])
    assert admission.allows(0, 4, is_idle=False, readers=lambda: [0])


def test_with_backups_nobody_waits_for_a_slow_worker_to_be_given_steps():
    admission = Synchronous(num_backups=1)
    admission.join(0)
    admission.join(1)
    admission.give(0, 4)
    assert admission.allows(0, 4, is_idle=False, readers=lambda: [0, 1])
