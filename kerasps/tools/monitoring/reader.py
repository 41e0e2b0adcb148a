"""Builds a status from the state on the coordinator, and from one request to each ps."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Mapping
from typing import Protocol

from kerasps.cluster.local.local_registry import LocalTasks
from kerasps.cluster.members.membership import WorkerInfo
from kerasps.dynamic import count_again
from kerasps.runtime.connected import closed_error
from kerasps.runtime.probe import Answer, ask_servers
from kerasps.step.tracing.traffic import LoadReport
from kerasps.tools.monitoring.advice import advice_for
from kerasps.tools.monitoring.status import (
    ProcessUsage,
    PSRunStatus,
    RunStatus,
    TableStatus,
    WorkerRunStatus,
)
from kerasps.tools.monitoring.usage import Listeners, UsageMeter
from kerasps.training.contract.host import Host
from kerasps.training.contract.run_meter import RunMeter
from kerasps.training.contract.staleness import Staleness

_LOGGER = logging.getLogger("kerasps")

_OF_ANSWERS = {Answer.IS_SILENT: "hangs", Answer.REFUSES: "lost", Answer.IS_OTHER: "lost"}
_LOOPS = {"train": "training", "test": "evaluating", "predict": "predicting"}
_CLOSED = "closed"
# A running ps answers within a millisecond. A status should not wait for one that hangs.
_ANSWER_S = 0.5
_STALENESS_S = 1.0
# In a shorter `fit` there is too little time to save.
_WORTH_ADVICE_S = 30.0


class MonitoredHost(Host, Protocol):
    """The host of a strategy, with the methods that a status needs."""

    @property
    def own_worker(self) -> int | None:
        """The index of the worker that this process is; None for a coordinator."""

    def worker_infos(self) -> list[WorkerInfo]:
        """Return the known state of each worker that does steps."""

    def ps_infos(self) -> list[WorkerInfo]:
        """Return the known state of each ps, without asking the ps."""


class StatusReader:
    """Builds the status of a run on request.

    Thread: any.
    """

    def __init__(self, host: MonitoredHost, local_tasks: LocalTasks | None) -> None:
        self._host = host
        self._local_tasks = local_tasks
        self._usage = UsageMeter()
        self._listeners = Listeners()
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None
        self._has_advised = False

    def read(self) -> RunStatus:
        """Return the current status in milliseconds, or in up to 1.5 seconds if a ps hangs."""
        host, is_closed = self._host, closed_error() is not None
        meter, report = host.run_meter, host.traffic_meter.report()
        workers, ps = host.worker_infos(), host.ps_infos()
        answers = self._answers(ps, is_closed)
        all_answer = all(answer is Answer.SERVES for answer in answers.values())
        staleness = host.staleness_meter.last_report
        if answers and all_answer:
            staleness = self._staleness()
        usages = {} if is_closed else self._usages([*workers, *ps])
        rates = {worker.index: _rate(meter, worker.index, report.seconds) for worker in workers}
        rate = sum(rates.values())
        # Turns a mean rate of the `fit` into a current one: the same traffic per step, at `rate`.
        speed = rate * report.seconds / report.steps if report.steps else 0.0
        state = _CLOSED if is_closed else _LOOPS.get(meter.mode, "idle")
        if state == "idle" and meter.is_fitting:
            state = "training"  # between two epochs, or before the first
        status = RunStatus(
            state=state,
            epoch=meter.epoch,
            steps=sum(steps for steps, _ in meter.steps().values()),
            steps_total=meter.total,
            steps_per_second=rate,
            seconds=report.seconds,
            workers=self._workers(workers, rates, staleness, answers, usages, is_closed),
            ps=self._ps(ps, report, speed, answers, usages, is_closed),
            tables=self._tables(report.seconds, speed),
            staleness_mean=staleness.mean if staleness.pushes else None,
            staleness_max=staleness.max if staleness.pushes else None,
            coordinator=self._usage.read(os.getpid()) if host.own_worker is None else None,
        )
        return dataclasses.replace(
            status, advice=advice_for(status, meter.execution_steps, meter.call_seconds)
        )

    def advise(self, seconds: float) -> None:
        """Log advice on making `fit` faster, once per process; nothing after a short `fit`."""
        if self._has_advised or seconds < _WORTH_ADVICE_S:
            return
        try:
            found = self.read().advice
        except Exception:  # advice must not end a `fit`
            _LOGGER.debug("There is no status for advice.", exc_info=True)
            return
        for advice in found:
            self._has_advised = True
            _LOGGER.warning("This training could be faster. %s", advice)

    def finish(self) -> None:
        """Wait for a request in flight, since the process must not end during it."""
        asking = self._asking
        if asking is not None and asking.ident is not None:
            asking.join(_STALENESS_S)

    # Requests

    def _answers(self, ps: list[WorkerInfo], is_closed: bool) -> dict[int, Answer]:
        if is_closed:
            return {}
        return ask_servers({info.index: info.address for info in ps}, _ANSWER_S)

    def _staleness(self) -> Staleness:
        """Return the counts of the ps, or the last ones read if the ps take long."""
        meter = self._host.staleness_meter

        def ask() -> None:
            # A failure here is ignored: the training reports it.
            with contextlib.suppress(Exception):
                meter.report()
                count_again()

        with self._lock:
            if self._asking is None or not self._asking.is_alive():
                self._asking = threading.Thread(target=ask, name="kerasps-status", daemon=True)
                with contextlib.suppress(RuntimeError):  # Python ends, and starts no thread
                    self._asking.start()
            asking = self._asking
        if asking.ident is not None:
            asking.join(_STALENESS_S)
        return meter.last_report

    def _usages(self, infos: list[WorkerInfo]) -> dict[str, ProcessUsage | None]:
        """Return the usage of the process at each address for which the process is known."""
        with self._lock:
            if self._local_tasks is not None:
                tasks = list(self._local_tasks.processes.values())
                pids = {task.address: task.pid for task in tasks if task.is_running()}
            else:
                pids = self._listeners.pids(info.address for info in infos)
        return {address: self._usage.read(pid) for address, pid in pids.items()}

    # Records

    def _workers(
        self,
        infos: list[WorkerInfo],
        rates: Mapping[int, float],
        staleness: Staleness,
        answers: Mapping[int, Answer],
        usages: Mapping[str, ProcessUsage | None],
        is_closed: bool,
    ) -> tuple[WorkerRunStatus, ...]:
        meter = self._host.run_meter
        counted, activities = meter.steps(), meter.activities()
        placement = self._host.extended.ledger.placement()
        ps_is_silent = any(
            answer is not Answer.SERVES and placement[ps].num_bytes
            for ps, answer in answers.items()
        )
        stale = {worker.worker: worker for worker in staleness}
        statuses = []
        for info in infos:
            steps, total = counted.get(info.index, (0, 0))
            activity, record = activities.get(info.index), stale.get(info.index)
            state = _CLOSED if is_closed else info.status
            waits_for = "" if activity is None or state != "connected" else activity.waits_for
            if activity is not None and activity.executions and ps_is_silent:
                waits_for = "ps"
            is_here = info.index == self._host.own_worker
            statuses.append(
                WorkerRunStatus(
                    worker=info.index,
                    address=info.address,
                    state=state,
                    since_s=info.since_s,
                    steps=steps,
                    steps_total=total,
                    steps_per_second=rates[info.index],
                    executions_in_flight=0 if activity is None else activity.executions,
                    waits_for=waits_for,
                    times_lost=info.times_lost,
                    times_back=info.times_back,
                    staleness_mean=None if record is None else record.mean,
                    staleness_max=None if record is None else record.max,
                    usage=self._usage.read(os.getpid()) if is_here else usages.get(info.address),
                )
            )
        return tuple(statuses)

    def _ps(
        self,
        infos: list[WorkerInfo],
        report: LoadReport,
        speed: float,
        answers: Mapping[int, Answer],
        usages: Mapping[str, ProcessUsage | None],
        is_closed: bool,
    ) -> tuple[PSRunStatus, ...]:
        placement = self._host.extended.ledger.placement()
        moved = self._host.traffic_meter.moved()
        statuses = []
        for info in infos:
            ps = info.index
            state = _OF_ANSWERS.get(answers.get(ps, Answer.SERVES), info.status)
            load, held, total = report[ps], placement[ps], moved[ps]
            statuses.append(
                PSRunStatus(
                    ps=ps,
                    address=info.address,
                    state=_CLOSED if is_closed else state,
                    num_variables=held.num_variables,
                    num_bytes=held.num_bytes,
                    rows_read_per_second=load.rows_read_per_second * speed,
                    bytes_read_per_second=load.bytes_read_per_second * speed,
                    rows_written_per_second=load.rows_written_per_second * speed,
                    bytes_written_per_second=load.bytes_written_per_second * speed,
                    rows_read_total=total.rows_read,
                    bytes_read_total=total.bytes_read,
                    rows_written_total=total.rows_written,
                    bytes_written_total=total.bytes_written,
                    hottest_tables=tuple((name, r * speed) for name, r in load.hottest_tables),
                    usage=usages.get(info.address),
                )
            )
        return tuple(statuses)

    def _tables(self, seconds: float, speed: float) -> tuple[TableStatus, ...]:
        meter = self._host.traffic_meter
        read = meter.rows_read()
        tables = [
            TableStatus(
                name,
                size.num_rows,
                read[name][0] / seconds * speed if seconds and name in read else 0.0,
                read[name][1] if name in read else 0,
                size.num_bytes,
                size.made_per_second,
                size.num_rows / size.most if size.most else None,
                size.made,
                size.evicted,
                size.dropped,
            )
            for name, size in meter.table_sizes().items()
        ]
        return tuple(sorted(tables, key=lambda table: (-table.rows_read_per_second, table.name)))


def _rate(meter: RunMeter, worker: int, seconds: float) -> float:
    """Return the steps per second of a worker: the current rate in a `fit`, else the last mean."""
    if meter.is_fitting:
        return meter.steps_per_second(worker)
    steps, _ = meter.steps().get(worker, (0, 0))
    return steps / seconds if seconds else 0.0
