"""Callbacks for training with parameter servers."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np
import tensorflow as tf

from kerasps import checks
from kerasps.base_strategy import BaseStrategy
from kerasps.layers.table_metrics import TableMetrics as TableMetrics  # users take it from here
from kerasps.tools.monitoring.metrics import METRICS
from kerasps.tools.monitoring.scalars import EventFile, write_scalar
from kerasps.tools.monitoring.status import described
from kerasps.training.contract.host import host_of

if TYPE_CHECKING:
    from kerasps.tools.monitoring.prometheus import Endpoint

_LOGGER = logging.getLogger("kerasps")

# The interval at which a thread checks if scalars are due.
_LOOK_S = 0.5
# TensorBoard shows a graph for each table, so their number is limited.
_MOST_TABLES = 20


class BackupAndRestore(keras.callbacks.BackupAndRestore):
    """`keras.callbacks.BackupAndRestore` with a time between backups.

    Under a `ParameterServerStrategy`, Keras's callback also backs up within epochs, and `fit`
    continues at the step of the backup. Use this class to set a time between backups that differs
    from KERASPS_BACKUP_INTERVAL. With `save_freq=False` it backs up only at intervals and on
    SIGTERM. Without a strategy it behaves as Keras's callback.

    ```python
    # `model` is one of a `ParameterServerStrategy`; run the script again after a loss.
    model.fit(
        np.ones((1000, 64)),
        np.ones(1000),
        epochs=3,
        callbacks=[kerasps.BackupAndRestore("backup", interval_s=300)],
    )
    ```

    Args:
        backup_dir: as in Keras: a directory for the backups of this training alone. The ps write
            there, so it should be on a file system that all tasks share.
        save_freq: as in Keras: `"epoch"`, a number of batches, or False. Default `"epoch"`.
        interval_s: seconds between backups, beside those that `save_freq` asks for. Default None:
            KERASPS_BACKUP_INTERVAL (60) if `save_freq` is `"epoch"`, else no backups at intervals.
        double_checkpoint: as in Keras: whether to keep the last two backups. Default False.
        delete_checkpoint: as in Keras: whether to delete the backups when `fit` ends without an
            error. Default True.
        delta: whether a backup holds, of tables without a vocabulary, only the rows that changed
            since the one before. All other variables are in it whole. Default False.
        full_every: with `delta=True`, the most such deltas on a whole backup. A whole one also
            follows when they have more than half of its bytes, and when `fit` begins. Default 100.

    Raises:
        TypeError: `interval_s` or `full_every` is not a number.
        ValueError: it is not positive and finite, or another argument is not what Keras takes.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: Literal["epoch"] | int = "epoch",
        *,
        interval_s: float | None = None,
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        delta: bool = False,
        full_every: int = 100,
    ) -> None:
        super().__init__(
            os.fspath(checks.path("backup_dir", backup_dir)),
            save_freq=save_freq,
            double_checkpoint=double_checkpoint,
            delete_checkpoint=delete_checkpoint,
        )
        if interval_s is not None:
            interval_s = checks.seconds(
                "Argument `interval_s` is not a time",
                interval_s,
                received=f"interval_s={interval_s!r}",
                advice="Give a number like 60, or leave it out.",
            )
        self.interval_s = interval_s
        full_every = checks.count(
            "Argument `full_every` is not a number of backups",
            full_every,
            least=1,
            expected="a whole number from 1",
            received=f"full_every={full_every!r}",
            advice="Give a number like 100, or leave it out.",
        )
        self.full_every = full_every if delta else 0


class StalenessLogger(keras.callbacks.Callback):
    """Adds the staleness of an epoch's updates to the epoch's logs.

    `staleness_mean` and `staleness_max` cover all pushes of the epoch (see
    `ParameterServerStrategy.staleness`). Later callbacks in the list get them in their logs:
    `keras.callbacks.TensorBoard` draws them, `CSVLogger` writes them, and `History` keeps them.
    Without a `ParameterServerStrategy` the callback adds nothing.

    ```python
    # `model` is one of a `ParameterServerStrategy`.
    model.fit(
        np.ones((1000, 64)),
        np.ones(1000),
        epochs=3,
        callbacks=[kerasps.StalenessLogger("logs"), keras.callbacks.TensorBoard("logs")],
    )
    ```

    Args:
        log_dir: a log directory for TensorBoard. After each epoch, the callback writes a histogram
            for each worker there, as the run `staleness`. Default None: no histogram.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._log_dir = None if log_dir is None else checks.path("log_dir", log_dir)
        self._file: EventFile | None = None
        self._before: dict[int, tuple[np.ndarray, float]] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forget the counts of earlier trainings."""
        self._before = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add to `logs`, and write histograms."""
        staleness = getattr(self.model._distribute_strategy, "staleness", None)
        if staleness is None:
            return
        report = staleness()
        counts, total = np.zeros(1, np.int64), 0.0
        for worker in report:
            before, total_before = self._before.get(worker.worker, (0, 0.0))
            counted, counted_total = np.array(worker.counts), worker.mean * worker.pushes
            self._before[worker.worker] = counted, counted_total
            counts, total = counts + counted - before, total + counted_total - total_before
            if (counted - before).any():
                self._write(f"staleness/worker_{worker.worker}", counted - before, epoch)
        if logs is not None and counts.any():
            largest = int(np.flatnonzero(counts)[-1])
            logs["staleness_mean"] = total / int(counts.sum())
            # The last count includes larger values, so the run's maximum stands for them.
            logs["staleness_max"] = report.max if largest == len(counts) - 1 else largest

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the file of histograms."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _write(self, tag: str, counts: np.ndarray, epoch: int) -> None:
        """Write a histogram that has a bar for each staleness."""
        if self._log_dir is None:
            return
        if self._file is None:
            self._file = EventFile(self._log_dir / "staleness", "StalenessLogger")
        # TensorBoard's format of a histogram: the two edges of each bar and its height.
        edges = np.arange(len(counts))
        bars = np.stack([edges - 0.5, edges + 0.5, counts], axis=1)[
            : np.flatnonzero(counts)[-1] + 1
        ]
        metadata = tf.compat.v1.SummaryMetadata(
            plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="histograms")
        )
        self._file.write(
            lambda: tf.summary.write(tag, tf.constant(bars), step=epoch, metadata=metadata)
        )


class ClusterMonitor(keras.callbacks.Callback):
    """Shows a training in TensorBoard, and to Prometheus at an address of this process.

    The numbers are those of `strategy.status()`: steps, staleness and losses of each worker, bytes,
    rows and traffic of each ps, memory and CPU. `docs/monitoring.md` lists them. The callback has
    no per-batch methods, so no worker waits for it.

    ```python
    # `model` is one of a `ParameterServerStrategy`.
    model.fit(
        np.ones((1000, 64)),
        np.ones(1000),
        epochs=3,
        callbacks=[kerasps.ClusterMonitor("logs", port=0)],
    )
    ```

    While `fit` runs, `http://host:port/metrics` has the text for Prometheus, and
    `kerasps top host:port` shows the same. The port closes when `fit` ends, also after an error.
    Under a `WorkerDrivenStrategy` each worker shows its numbers: worker i at `port + i`, and in the
    directory `worker_i` of `log_dir`. Without a strategy of kerasps the callback does nothing.

    Args:
        log_dir: a log directory for TensorBoard. Scalars go there as the run `cluster`; their axis
            counts the steps of this process's trainings. Default None: no scalars.
        port: the port for Prometheus and `kerasps top`, 0 for a free one, which `address` names.
            It needs the package `prometheus-client`. Default None: no port is opened.
        host: the address to listen on. There is no access control: on any address but the
            loopback, everyone who can connect can read the numbers. Default `"127.0.0.1"`.
        update_freq: `"epoch"`, or the number of steps between writes of scalars, which come up to
            half a second late. Default `"epoch"`.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: an argument is out of its range, or neither `log_dir` nor `port` is given.
        ImportError: `port` is given, and `prometheus-client` is not installed.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        port: int | None = None,
        host: str = "127.0.0.1",
        *,
        update_freq: Literal["epoch"] | int = "epoch",
    ) -> None:
        super().__init__()
        if log_dir is None and port is None:
            raise ValueError(
                "A ClusterMonitor without arguments shows nothing. Expected: `log_dir` for "
                "TensorBoard, `port` for Prometheus, or both. Received: neither. Give one like "
                "`kerasps.ClusterMonitor('logs')`; `kerasps top` needs no callback."
            )
        self.log_dir = None if log_dir is None else checks.path("log_dir", log_dir)
        self.port = None if port is None else _checked_port(port)
        if not isinstance(host, str) or not host:
            kind = ValueError if isinstance(host, str) else TypeError
            raise kind(
                "Argument `host` is not an address. Expected: a text. Received: "
                f"host={host!r}. Give one like '127.0.0.1'."
            )
        self.host = host
        if update_freq != "epoch":
            update_freq = checks.count(
                "Argument `update_freq` is neither 'epoch' nor a number of steps",
                update_freq,
                expected="'epoch', or a whole number of at least 1",
                received=f"update_freq={update_freq!r}",
                advice="Give 'epoch', or a number like 100.",
            )
        self.update_freq = update_freq
        if port is not None:
            _endpoint_class()
        self._run: _MonitoredRun | None = None

    @property
    def address(self) -> str | None:
        """The `"host:port"` of `/metrics` and `/status`; None if no port is open."""
        return None if self._run is None else self._run.address

    def __getstate__(self) -> dict[str, Any]:
        # A copy is for another `fit`, which sets its model and opens its own files and port.
        return {**self.__dict__, "_run": None, "_model": None}

    def on_train_begin(self, logs: object = None) -> None:
        """Open the port and the file.

        Warns if the port is in use, or this process cannot listen on it.
        """
        self._close()
        strategy = self.model._distribute_strategy
        if not isinstance(strategy, BaseStrategy):
            _LOGGER.warning(
                "A ClusterMonitor does nothing here: the model is of no strategy with workers."
            )
            return
        self._run = run = _MonitoredRun(strategy)
        host_of(self.model).run_meter.when_fit_ends(self._close)
        if self.port is not None:
            run.listen(self.host, self.port)
        if self.log_dir is not None:
            run.write_to(self.log_dir)
            if self.update_freq != "epoch":
                run.write_every(self.update_freq)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Write scalars."""
        if self._run is not None and self.update_freq == "epoch":
            self._run.write()

    def on_train_end(self, logs: object = None) -> None:
        """Write the last scalars, and close the port and the file."""
        if self._run is not None and self.update_freq != "epoch":
            self._run.write()
        self._close()

    def _close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()


def _checked_port(port: object) -> int:
    number = checks.count(
        "Argument `port` is not a port",
        port,
        least=0,
        expected="a whole number from 0 to 65535",
        received=f"port={port!r}",
        advice="Give one like 9090, or 0 for a free one.",
    )
    if number > 65535:
        raise ValueError(
            "Argument `port` is not a port. Expected: a whole number from 0 to 65535. Received: "
            f"port={port!r}. Give one like 9090, or 0 for a free one."
        )
    return number


def _endpoint_class() -> type[Endpoint]:
    """Return the server of metrics; raise ImportError if its package is not installed."""
    try:
        from kerasps.tools.monitoring.prometheus import Endpoint
    except ImportError as exc:
        raise ImportError(
            "A ClusterMonitor with a port needs the package `prometheus-client`. Expected: a "
            f"package that imports. Received: {exc}. Install it with "
            "`pip install 'prometheus-client>=0.21'`, or leave `port` out."
        ) from exc
    return Endpoint


class _MonitoredRun:
    """The port and the file of a `ClusterMonitor` during one `fit`."""

    def __init__(self, strategy: BaseStrategy) -> None:
        self._strategy = strategy
        host = strategy.extended.host
        self._worker: int | None = host.own_worker
        self._meter = host.run_meter
        self._endpoint: Endpoint | None = None
        self._file: EventFile | None = None
        self._is_over = threading.Event()

    @property
    def address(self) -> str | None:
        """The `"host:port"` that it listens on; None while it does not listen."""
        return None if self._endpoint is None else self._endpoint.address

    def listen(self, host: str, port: int) -> None:
        """Open the port."""
        if self._worker is not None and port:
            port += self._worker
        strategy = self._strategy
        try:
            self._endpoint = _endpoint_class()(
                host,
                port,
                strategy.status,
                lambda: described(repr(strategy), strategy.status(), strategy.description.jobs),
            )
        except (OSError, OverflowError, RuntimeError) as exc:  # RuntimeError: no thread can start
            warnings.warn(
                f"The ClusterMonitor does not listen at {host}:{port}; the training goes on. "
                "Expected: an address of this machine, and a port that is not in use. Received: "
                f"{exc}. Give another port, 0 for a free one, or another host.",
                UserWarning,
                stacklevel=3,
            )
            return
        _LOGGER.info("http://%s/metrics has the numbers of this training.", self.address)

    def write_to(self, log_dir: Path) -> None:
        """Open the file."""
        if self._worker is not None:
            log_dir /= f"worker_{self._worker}"
        self._file = EventFile(log_dir / "cluster", "ClusterMonitor")

    def write_every(self, steps: int) -> None:
        """Start a thread that writes scalars each time this number of steps has passed."""

        def write_when_due() -> None:
            last = self._meter.total
            while not self._is_over.wait(_LOOK_S):
                if self._meter.total - last >= steps:
                    last = self._meter.total
                    self.write()

        threading.Thread(target=write_when_due, name="kerasps-scalars", daemon=True).start()

    def write(self) -> None:
        """Write the current scalars."""
        if self._file is None:
            return
        try:
            status = self._strategy.status()
        except Exception:  # while the cluster closes, or a ps is lost, which `fit` reports
            _LOGGER.debug("There is no status to write.", exc_info=True)
            return
        tables = {table.name for table in status.tables[:_MOST_TABLES]}

        def write_scalars() -> None:
            for metric in METRICS:
                for labels, value in metric.samples(status):
                    if len(labels) > 1 or (
                        metric.subject.labels == ("table",) and labels[0] not in tables
                    ):
                        continue
                    tag = "/".join([metric.name.removeprefix("kerasps_"), *labels])
                    write_scalar(tag.replace(":", "_"), value, status.steps_total)

        self._file.write(write_scalars)

    def close(self) -> None:
        """Close the port and the file."""
        self._is_over.set()
        if self._endpoint is not None:
            self._endpoint.close()
        if self._file is not None:
            self._file.close()
