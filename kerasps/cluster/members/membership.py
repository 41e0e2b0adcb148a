"""Keeps watch over the tasks of a connected cluster, and takes workers back that come back.

TensorFlow notices a task that died when it calls it, and one that hangs never. So a thread asks
every task once a second (`ask_servers`). What follows from the answers, `Presence` knows. Here it
is done. Connections to a task that hangs are broken, so that the calls which wait for it end. A
worker that answers again is put back into TensorFlow's cluster, by itself, whatever the others do;
those that are not there are taken out then, since TensorFlow asks each that is in.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import tensorflow as tf

from kerasps.cluster.connection.connect import update_tasks
from kerasps.cluster.members.presence import Noticed, Presence, Status, Task
from kerasps.cluster.serving.leaving import LET_GO, NAME_FILE
from kerasps.runtime.errors import error_of
from kerasps.runtime.grpc_options import hang_limit
from kerasps.runtime.probe import Answer, ask_servers, break_connections
from kerasps.runtime.supervision import tell_supervisor

_LOGGER = logging.getLogger("kerasps")

# How often tasks are asked, and how long each has to answer. A task that is there does so within a
# millisecond; one that is away is asked more often, since others wait for it.
_INTERVAL_S = 1.0
_INTERVAL_AWAY_S = 0.1
_ANSWER_S = 1.0
# How often the cluster resolver is asked where the workers are.
_RESOLVE_S = 2.0
# After TensorFlow failed to take workers back, mostly because one of them died meanwhile.
_PAUSE_S = 0.5

# The values of `Status`, for type checkers.
WorkerStatus = Literal["there", "does not answer", "lost", "is about to leave", "has left", "joins"]


@dataclass(frozen=True)
class WorkerInfo:
    """What is known of a worker.

    ```python
    for worker in strategy.workers():
        print(worker.index, worker.address, worker.status, worker.since_s)
    ```

    Args:
        index: its index in its job.
        address: its `"host:port"`.
        status: `"there"`, `"does not answer"`, `"lost"`, `"is about to leave"`, `"has left"` or
            `"joins"`.
        since_s: for how many seconds.
    """

    index: int
    address: str
    status: WorkerStatus
    since_s: float


class Membership:
    """Who is there of a cluster's workers and ps, from when it is connected on.

    Args:
        addresses: the `"host:port"` of each worker and ps.
        resolve: returns where the workers are now, by index; asked again and again.
    """

    def __init__(
        self, addresses: Mapping[Task, str], resolve: Callable[[], Mapping[int, str]]
    ) -> None:
        self._resolve = resolve
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._presence = Presence(addresses, limit_s=hang_limit(), now=time.monotonic())
        self._has_stopped = self._is_closed = False
        self._num_users = 0
        # Workers that are being told that they may go.
        self._let_go: set[int] = set()
        # One at a time tells TensorFlow who is there.
        self._to_tell = threading.Event()
        self._listeners: list[Callable[[Noticed], None]] = []

    def start(self) -> None:
        """Begin to watch."""
        for run, name in ((self._watch, "kerasps-watch"), (self._tell, "kerasps-members")):
            threading.Thread(target=run, name=name, daemon=True).start()

    def stop(self) -> None:
        """Watch no more: the process ends."""
        with self._news:
            self._has_stopped = True
            self._news.notify_all()
        self._to_tell.set()

    def close(self) -> None:
        """Watch no more: the cluster is closed, and counts as lost from here on."""
        self._is_closed = True
        self.stop()

    @property
    def is_closed(self) -> bool:
        """Whether the cluster has been closed."""
        return self._is_closed

    def listen(self, listener: Callable[[Noticed], None]) -> None:
        """Have `listener` called with what is noticed. Thread: that of the watch, or of a session.

        It is kept for as long as the process lives.
        """
        self._listeners.append(listener)

    # Who is there

    @property
    def num_workers(self) -> int:
        """How many workers there are, with those that are away."""
        with self._lock:
            return len(self._presence.of("worker"))

    def workers(self) -> list[WorkerInfo]:
        """Return what is known of each worker."""
        with self._lock:
            presence, now = self._presence, time.monotonic()
            return [
                WorkerInfo(
                    index,
                    presence.addresses["worker", index],
                    presence.status(("worker", index)).value,
                    now - presence.since(("worker", index)),
                )
                for index in presence.of("worker")
            ]

    def address(self, task: Task) -> str:
        """Return where a task is."""
        with self._lock:
            return self._presence.addresses[task]

    @property
    def absent_workers(self) -> set[int]:
        """The workers that can be given nothing: lost, hung, gone, or not there yet."""
        there = (Status.THERE, Status.LEAVING)
        with self._lock:
            return {*self._presence.of("worker")} - {*self._presence.of("worker", *there)}

    @property
    def leaving_workers(self) -> set[int]:
        """The workers that finish what they do, and are to be given nothing new."""
        with self._lock:
            return {*self._presence.of("worker", Status.LEAVING)}

    @property
    def lost_ps(self) -> int | None:
        """A ps that hangs, or is gone; None where all are there. Of a closed cluster, the first."""
        if self._is_closed:
            return 0
        with self._lock:
            lost = self._presence.of("ps", Status.HUNG, Status.LOST)
        return lost[0] if lost else None

    def hangs(self, ps: int) -> bool:
        """Return whether a ps that does not answer may still be alive."""
        with self._lock:
            return self._presence.status(("ps", ps)) is Status.HUNG

    def has_worker(self, worker: int) -> bool:
        """Return whether a worker can be called."""
        return worker not in self.absent_workers

    def generation(self, worker: int) -> int:
        """Return how often a worker was taken back. What it held before is gone each time."""
        with self._lock:
            return self._presence.generation(("worker", worker))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """In this context, workers that are about to leave are kept until they hold nothing."""
        with self._lock:
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1

    # What happens

    def lose(self, worker: int, reason: str) -> None:
        """Note that a call to a worker failed, and that it does not know this process any more."""
        with self._news:
            noticed = self._presence.lose(("worker", worker), time.monotonic(), reason)
        self._do(noticed)

    def give_up_leaving(self, worker: int, reason: str) -> bool:
        """Give up a worker on which a call failed, where it takes no new connections.

        It died, or is about to leave, whether that was noticed before or not, and cannot finish
        what it does: a ps that has no connection to it yet gets none. Returns whether it is so.
        """
        address = self.address(("worker", worker))
        if ask_servers({worker: address}, _ANSWER_S)[worker] is not Answer.REFUSES:
            return False
        if error_of(f"/job:worker/replica:0/task:{worker}") is not None:
            self.lose(worker, reason)
            return True
        with self._news:
            noticed = self._presence.give_up_leaving(("worker", worker), time.monotonic(), reason)
        self._do(noticed)
        self.dismiss(worker)
        return True

    def wait_until_there(self, worker: int) -> None:
        """Wait until a worker can be called again. Thread: that of the worker's sessions."""
        with self._news:
            self._news.wait_for(
                lambda: (
                    self._has_stopped
                    or self._presence.status(("worker", worker)) in (Status.THERE, Status.LEAVING)
                )
            )

    def move(self, addresses: Mapping[int, str]) -> None:
        """Note where workers are now, by index, and which are new."""
        tasks = {("worker", index): address for index, address in addresses.items()}
        with self._news:
            noticed = self._presence.move(tasks, time.monotonic())
        self._do(noticed)

    def dismiss(self, worker: int) -> None:
        """Tell a worker to go that is about to leave and holds nothing any more."""
        with self._lock:
            if worker in self._let_go:
                return
            self._let_go.add(worker)
        # Apart, since the worker may hang by now, or be gone.
        threading.Thread(target=self._say_goodbye, args=[worker], daemon=True).start()

    def _say_goodbye(self, worker: int) -> None:
        _tell_to_go(worker)
        with self._news:
            noticed = self._presence.left(("worker", worker), time.monotonic())
            self._let_go.discard(worker)
        self._do(noticed)

    # The watch

    def _watch(self) -> None:
        resolve_at = 0.0
        interval = _INTERVAL_S
        while not self._has_stopped:
            began = time.monotonic()
            with self._lock:
                self._presence.tick(began, interval)
                addresses = self._presence.addresses
            self._hear(ask_servers(addresses, _ANSWER_S))
            if began >= resolve_at:
                resolve_at = began + _RESOLVE_S
                self._look_for_moves()
            with self._news:
                interval = _INTERVAL_AWAY_S if self._presence.is_anyone_away else _INTERVAL_S
                self._news.wait_for(lambda: self._has_stopped, interval)

    def _hear(self, answers: Mapping[Task, Answer]) -> None:
        with self._news:
            noticed = self._presence.hear(answers, time.monotonic(), _ANSWER_S)
            is_back = bool(self._presence.back)
            refusing = [
                task
                for task, answer in answers.items()
                if answer is Answer.REFUSES and self._presence.status(task) is Status.THERE
            ]
            idle = [] if self._num_users else self._presence.of("worker", Status.LEAVING)
        self._do(noticed)
        for task in refusing:
            self._look_at_refusing(task)
        for worker in idle:
            self.dismiss(worker)
        if is_back:
            self._to_tell.set()

    def _look_at_refusing(self, task: Task) -> None:
        """Tell a task that died from one that takes no new connections.

        A worker that does not is about to leave. A ps to which no steps go is missed here first.
        """
        job, index = task
        error = error_of(f"/job:{job}/replica:0/task:{index}")
        with self._news:
            now = time.monotonic()
            if error is not None:
                noticed = self._presence.lose(task, now, "connection refused")
            else:
                noticed = self._presence.leave(task, now) if job == "worker" else []
        self._do(noticed)

    def _look_for_moves(self) -> None:
        try:
            addresses = self._resolve()
        except Exception:  # a scheduler's API may be down for a while
            _LOGGER.debug("The cluster resolver failed.", exc_info=True)
            return
        self.move(addresses)

    # What follows

    def _do(self, noticed: list[Noticed]) -> None:
        if self._has_stopped:
            return
        for one in noticed:
            if one.status is Status.HUNG:
                break_connections(one.address)
                if one.after_s >= hang_limit():  # others may have been impatient
                    tell_supervisor("hung", *one.task)
            text = _in_words(one)
            if text:
                _LOGGER.warning(text)
            for listener in self._listeners:
                listener(one)
        if noticed:
            with self._news:
                self._news.notify_all()
            self._to_tell.set()

    def _tell(self) -> None:
        """Tell TensorFlow who is there, whenever that changes."""
        while not self._has_stopped:
            self._to_tell.wait()
            self._to_tell.clear()
            while not self._has_stopped and self._is_due():
                if not self._try_to_tell():
                    time.sleep(_PAUSE_S)

    def _is_due(self) -> bool:
        with self._lock:
            # Nothing is to be won, and TensorFlow would wait for the ps.
            if not self._presence.has_all_ps:
                return False
            return bool(self._presence.back)

    def _try_to_tell(self) -> bool:
        """Update TensorFlow's cluster; return whether that went well.

        TensorFlow asks each member whether it knows this process, and waits for the answer.
        """
        with self._lock:
            members = {**self._presence.connected, **self._presence.back}
        answers = ask_servers(members, _ANSWER_S)
        with self._news:
            noticed = self._presence.impatient(answers, time.monotonic())
            silent = {one.task for one in noticed}
            back = [
                task
                for task in self._presence.back
                if answers.get(task) is Answer.SERVES and task in members
            ]
            kept = {
                task: address
                for task, address in self._presence.connected.items()
                if task not in silent
            }
        self._do(noticed)
        members = {**kept, **{task: members[task] for task in back}}
        try:
            update_tasks(members)
        except tf.errors.OpError as exc:
            _LOGGER.debug("TensorFlow did not take workers back.", exc_info=exc)
            return False
        with self._news:
            noticed = self._presence.take(back, time.monotonic())
        self._do(noticed)
        return True


def _tell_to_go(worker: int) -> None:
    """Tell a worker that is about to leave that it may."""
    with contextlib.suppress(tf.errors.OpError), tf.device(f"/job:worker/task:{worker}"):
        tf.io.write_file(NAME_FILE, LET_GO)


def _in_words(noticed: Noticed) -> str:
    """Return one line that says what was noticed and what happens next; empty for nothing."""
    job, index = noticed.task
    name = f"{job} {index} at {noticed.address}"
    if job == "ps":
        if noticed.status is Status.HUNG:
            return (
                f"{name} has not answered for {noticed.after_s:.0f} s and counts as lost, with its "
                "variables."
            )
        return ""
    match noticed.status:
        case Status.HUNG if noticed.before is Status.LOST:
            return f"{name} has not answered for {noticed.after_s:.0f} s: it hangs."
        case Status.HUNG:
            return (
                f"{name} has not answered for {noticed.after_s:.0f} s and counts as lost: what it "
                "was doing goes to others. It is taken back when it answers."
            )
        case Status.LOST:
            return (
                f"{name} is lost ({noticed.reason}): what it was doing goes to others. It is taken "
                "back when it answers."
            )
        case Status.LEAVING:
            return f"{name} is about to leave: it finishes what it does, and is given no more."
        case Status.LEFT if noticed.reason:
            return (
                f"{name} leaves, and could not finish what it was doing ({noticed.reason}): that "
                "goes to others."
            )
        case Status.THERE if noticed.before is Status.JOINING:
            return f"{name} has joined."
        case Status.THERE:
            return f"{name} is back, after {noticed.after_s:.1f} s."
    return ""
