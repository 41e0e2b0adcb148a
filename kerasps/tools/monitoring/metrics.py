"""Names the numbers of a status, as metrics for Prometheus and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kerasps.tools.monitoring.status import RunStatus

# Pairs of the labels' values and of a value, or of the record that has it.
Samples = Iterator[tuple[tuple[str, ...], Any]]


@dataclass(frozen=True)
class Subject:
    """The records of a status that a metric has a sample for."""

    labels: tuple[str, ...]
    records: Callable[[RunStatus], Samples]


@dataclass(frozen=True)
class Metric:
    """A metric as Prometheus defines it.

    Attributes:
        name: its name, which ends in `_total` for a counter.
        subject: the records that it is about.
        value: returns its value for a record; None for no sample.
    """

    name: str
    subject: Subject
    value: Callable[[Any], float | None]
    text: str

    @property
    def is_counter(self) -> bool:
        """True if the value only grows while the process lives."""
        return self.name.endswith("_total")

    def samples(self, status: RunStatus) -> Samples:
        """Yield pairs of the labels' values and the metric's value."""
        for labels, record in self.subject.records(status):
            found = self.value(record)
            if found is not None:
                yield labels, found


def _tasks(status: RunStatus) -> Samples:
    yield from (((f"worker:{worker.worker}",), worker) for worker in status.workers)
    yield from (((f"ps:{ps.ps}",), ps) for ps in status.ps)


def _processes(status: RunStatus) -> Samples:
    usages = [("coordinator", status.coordinator)]
    usages += [(task, record.usage) for (task,), record in _tasks(status)]
    return (((task,), usage) for task, usage in usages if usage is not None)


def _waits(status: RunStatus) -> Samples:
    for worker in status.workers:
        for what in ("data", "ps", "workers", "coordinator", "session"):
            yield (str(worker.worker), what), worker.waits_for == what


_RUN = Subject((), lambda status: iter([((), status)]))
_WORKER = Subject(("worker",), lambda status: (((str(w.worker),), w) for w in status.workers))
_PS = Subject(("ps",), lambda status: (((str(ps.ps),), ps) for ps in status.ps))
_TABLE = Subject(("table",), lambda status: (((table.name,), table) for table in status.tables))
_TASK = Subject(("task",), _tasks)
_PROCESS = Subject(("task",), _processes)
# The ps are not counted: a training ends with the loss of one.
_LOST = Subject(("task",), lambda status: (((f"worker:{w.worker}",), w) for w in status.workers))
_WAIT = Subject(("worker", "what"), _waits)

# fmt: off
METRICS = (
    Metric("kerasps_steps_total", _RUN, lambda run: run.steps_total,
           "Training steps of all workers."),
    Metric("kerasps_steps_per_second", _RUN, lambda run: run.steps_per_second,
           "Training steps of all workers per second, in the last ten seconds."),
    Metric("kerasps_epoch", _RUN, lambda run: run.epoch,
           "Number of the running epoch."),
    Metric("kerasps_training", _RUN, lambda run: float(run.state == "training"),
           "1 while a training loop runs, else 0."),
    Metric("kerasps_worker_steps_total", _WORKER, lambda worker: worker.steps_total,
           "Training steps of a worker."),
    Metric("kerasps_worker_steps_per_second", _WORKER, lambda worker: worker.steps_per_second,
           "Training steps of a worker per second, in the last ten seconds."),
    Metric("kerasps_step_seconds", _WORKER,
           lambda worker: 1 / worker.steps_per_second if worker.steps_per_second else None,
           "Seconds of a step on a worker, in the last ten seconds."),
    Metric("kerasps_worker_executions_in_flight", _WORKER, lambda w: w.executions_in_flight,
           "Executions sent to a worker that it has not reported as done."),
    Metric("kerasps_worker_waits", _WAIT, float,
           "1 if a worker waits for this, else 0."),
    Metric("kerasps_worker_staleness_updates", _WORKER, lambda worker: worker.staleness_mean,
           "Mean staleness of the updates of a worker in the running or last fit."),
    Metric("kerasps_staleness_updates", _RUN, lambda run: run.staleness_mean,
           "Mean staleness of all updates in the running or last fit."),
    Metric("kerasps_staleness_updates_max", _RUN, lambda run: run.staleness_max,
           "Largest staleness of an update in the running or last fit."),
    Metric("kerasps_up", _TASK, lambda task: float(task.state == "connected"),
           "1 if a task is connected, else 0."),
    Metric("kerasps_losses_total", _LOST, lambda worker: worker.times_lost,
           "Number of times that a task was lost."),
    Metric("kerasps_restarts_total", _LOST, lambda worker: worker.times_back,
           "Number of times that a lost task was taken back."),
    Metric("kerasps_ps_bytes", _PS, lambda ps: ps.num_bytes,
           "Bytes of variables that a ps holds."),
    Metric("kerasps_ps_variables", _PS, lambda ps: ps.num_variables,
           "Variables that a ps holds; a shard counts as one."),
    Metric("kerasps_pull_bytes_total", _PS, lambda ps: ps.bytes_read_total,
           "Bytes of values that a ps has sent."),
    Metric("kerasps_pull_rows_total", _PS, lambda ps: ps.rows_read_total,
           "Rows of tables that a ps has sent."),
    Metric("kerasps_push_bytes_total", _PS, lambda ps: ps.bytes_written_total,
           "Bytes of gradients and new values that a ps has received."),
    Metric("kerasps_push_rows_total", _PS, lambda ps: ps.rows_written_total,
           "Rows for which a ps has received gradients."),
    Metric("kerasps_table_rows", _TABLE, lambda table: table.num_rows,
           "Rows of a table."),
    Metric("kerasps_table_bytes", _TABLE, lambda table: table.num_bytes,
           "Bytes of the rows of a table, without slots."),
    Metric("kerasps_table_rows_made_per_second", _TABLE, lambda table: table.rows_made_per_second,
           "Rows that a table without a vocabulary gets per second."),
    Metric("kerasps_table_share_of_max_rows", _TABLE, lambda table: table.share_of_max_rows,
           "Share of the rows that a table without a vocabulary may have."),
    Metric("kerasps_table_rows_made_total", _TABLE, lambda table: table.rows_made_total,
           "Rows that a table without a vocabulary got."),
    Metric("kerasps_table_rows_evicted_total", _TABLE, lambda table: table.rows_evicted_total,
           "Rows that a table without a vocabulary gave up."),
    Metric("kerasps_table_gradients_dropped_total", _TABLE,
           lambda table: table.gradients_dropped_total,
           "Gradients of ids that got no row, by admission or for want of room."),
    Metric("kerasps_table_rows_read_total", _TABLE, lambda table: table.rows_read_total,
           "Rows of a table that steps have read."),
    Metric("kerasps_process_memory_bytes", _PROCESS, lambda usage: usage.memory_bytes,
           "Resident memory of a task's process, if it is on this machine."),
    Metric("kerasps_process_cpu_seconds_total", _PROCESS, lambda usage: usage.cpu_seconds,
           "Processor time of a task's process, if it is on this machine."),
)
# fmt: on
