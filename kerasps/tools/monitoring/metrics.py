"""Names the numbers of a status, as metrics for Prometheus and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kerasps.tools.monitoring.status import ProcessUsage, PSRunStatus, RunStatus, WorkerRunStatus

Samples = Iterator[tuple[tuple[str, ...], float]]


@dataclass(frozen=True)
class Metric:
    """A metric as Prometheus defines it.

    Attributes:
        name: its name, which ends in `_total` for a counter.
        text: its description.
        labels: the names of its labels.
        samples: yields pairs of the labels' values and the metric's value, for a status.
    """

    name: str
    text: str
    labels: tuple[str, ...]
    samples: Callable[[RunStatus], Samples]

    @property
    def is_counter(self) -> bool:
        """True if the value only grows while the process lives."""
        return self.name.endswith("_total")


def _of_run(value: Callable[[RunStatus], float | None]) -> Callable[[RunStatus], Samples]:
    def samples(status: RunStatus) -> Samples:
        found = value(status)
        if found is not None:
            yield (), found

    return samples


def _of_workers(
    value: Callable[[WorkerRunStatus], float | None], prefix: str = ""
) -> Callable[[RunStatus], Samples]:
    def samples(status: RunStatus) -> Samples:
        for worker in status.workers:
            found = value(worker)
            if found is not None:
                yield (f"{prefix}{worker.worker}",), found

    return samples


def _of_ps(value: Callable[[PSRunStatus], float]) -> Callable[[RunStatus], Samples]:
    def samples(status: RunStatus) -> Samples:
        for ps in status.ps:
            yield (str(ps.ps),), value(ps)

    return samples


def _of_tasks(
    value: Callable[[WorkerRunStatus | PSRunStatus], float],
) -> Callable[[RunStatus], Samples]:
    def samples(status: RunStatus) -> Samples:
        for worker in status.workers:
            yield (f"worker:{worker.worker}",), value(worker)
        for ps in status.ps:
            yield (f"ps:{ps.ps}",), value(ps)

    return samples


def _of_processes(value: Callable[[ProcessUsage], float]) -> Callable[[RunStatus], Samples]:
    def samples(status: RunStatus) -> Samples:
        usages = [("coordinator", status.coordinator)]
        usages += [(f"worker:{worker.worker}", worker.usage) for worker in status.workers]
        usages += [(f"ps:{ps.ps}", ps.usage) for ps in status.ps]
        for task, usage in usages:
            if usage is not None:
                yield (task,), value(usage)

    return samples


def _of_tables(value: Callable[[int, int], float]) -> Callable[[RunStatus], Samples]:
    def samples(status: RunStatus) -> Samples:
        for table in status.tables:
            yield (table.name,), value(table.num_rows, table.rows_read_total)

    return samples


def _waits(status: RunStatus) -> Samples:
    for worker in status.workers:
        for what in ("data", "ps", "workers", "coordinator", "session"):
            yield (str(worker.worker), what), float(worker.waits_for == what)


def _step_seconds(worker: WorkerRunStatus) -> float | None:
    return 1 / worker.steps_per_second if worker.steps_per_second else None


_WORKER, _PS, _TASK, _TABLE = ("worker",), ("ps",), ("task",), ("table",)

METRICS = (
    Metric(
        "kerasps_steps_total",
        "Training steps of all workers.",
        (),
        _of_run(lambda status: status.steps_total),
    ),
    Metric(
        "kerasps_steps_per_second",
        "Training steps of all workers per second, in the last ten seconds.",
        (),
        _of_run(lambda status: status.steps_per_second),
    ),
    Metric("kerasps_epoch", "Number of the running epoch.", (), _of_run(lambda s: s.epoch)),
    Metric(
        "kerasps_training",
        "1 while a training loop runs, else 0.",
        (),
        _of_run(lambda status: float(status.state == "training")),
    ),
    Metric(
        "kerasps_worker_steps_total",
        "Training steps of a worker.",
        _WORKER,
        _of_workers(lambda worker: worker.steps_total),
    ),
    Metric(
        "kerasps_worker_steps_per_second",
        "Training steps of a worker per second, in the last ten seconds.",
        _WORKER,
        _of_workers(lambda worker: worker.steps_per_second),
    ),
    Metric(
        "kerasps_step_seconds",
        "Seconds of a step on a worker, in the last ten seconds.",
        _WORKER,
        _of_workers(_step_seconds),
    ),
    Metric(
        "kerasps_worker_executions_in_flight",
        "Executions sent to a worker that it has not reported as done.",
        _WORKER,
        _of_workers(lambda worker: worker.executions_in_flight),
    ),
    Metric(
        "kerasps_worker_waits",
        "1 if a worker waits for this, else 0.",
        ("worker", "what"),
        _waits,
    ),
    Metric(
        "kerasps_worker_staleness_updates",
        "Mean staleness of the updates of a worker in the running or last fit.",
        _WORKER,
        _of_workers(lambda worker: worker.staleness_mean),
    ),
    Metric(
        "kerasps_staleness_updates",
        "Mean staleness of all updates in the running or last fit.",
        (),
        _of_run(lambda status: status.staleness_mean),
    ),
    Metric(
        "kerasps_staleness_updates_max",
        "Largest staleness of an update in the running or last fit.",
        (),
        _of_run(lambda status: status.staleness_max),
    ),
    Metric(
        "kerasps_up",
        "1 if a task is connected, else 0.",
        _TASK,
        _of_tasks(lambda task: float(task.state == "connected")),
    ),
    Metric(
        "kerasps_losses_total",
        "Number of times that a task was lost.",
        _TASK,
        _of_workers(lambda worker: worker.times_lost, "worker:"),
    ),
    Metric(
        "kerasps_restarts_total",
        "Number of times that a lost task was taken back.",
        _TASK,
        _of_workers(lambda worker: worker.times_back, "worker:"),
    ),
    Metric(
        "kerasps_ps_bytes",
        "Bytes of variables that a ps holds.",
        _PS,
        _of_ps(lambda p: p.num_bytes),
    ),
    Metric(
        "kerasps_ps_variables",
        "Variables that a ps holds; a shard counts as one.",
        _PS,
        _of_ps(lambda ps: ps.num_variables),
    ),
    Metric(
        "kerasps_pull_bytes_total",
        "Bytes of values that a ps has sent.",
        _PS,
        _of_ps(lambda ps: ps.bytes_read_total),
    ),
    Metric(
        "kerasps_pull_rows_total",
        "Rows of tables that a ps has sent.",
        _PS,
        _of_ps(lambda ps: ps.rows_read_total),
    ),
    Metric(
        "kerasps_push_bytes_total",
        "Bytes of gradients and new values that a ps has received.",
        _PS,
        _of_ps(lambda ps: ps.bytes_written_total),
    ),
    Metric(
        "kerasps_push_rows_total",
        "Rows for which a ps has received gradients.",
        _PS,
        _of_ps(lambda ps: ps.rows_written_total),
    ),
    Metric("kerasps_table_rows", "Rows of a table.", _TABLE, _of_tables(lambda rows, _: rows)),
    Metric(
        "kerasps_table_rows_read_total",
        "Rows of a table that steps have read.",
        _TABLE,
        _of_tables(lambda _, read: read),
    ),
    Metric(
        "kerasps_process_memory_bytes",
        "Resident memory of a task's process, if it is on this machine.",
        _TASK,
        _of_processes(lambda usage: usage.memory_bytes),
    ),
    Metric(
        "kerasps_process_cpu_seconds_total",
        "Processor time of a task's process, if it is on this machine.",
        _TASK,
        _of_processes(lambda usage: usage.cpu_seconds),
    ),
)
