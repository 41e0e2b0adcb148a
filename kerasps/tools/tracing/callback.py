"""`Trace`: a callback that traces some steps of a training on all tasks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings

import keras

from kerasps import checks
from kerasps.errors import UnsupportedError
from kerasps.tools.tracing.recording import MAX_SECONDS, Recording
from kerasps.tools.tracing.report import Report, new_run, write_report
from kerasps.training.contract.host import host_of

# A recording holds only a part of the executions in flight at its begin. A worker has this many,
# and those of fast steps are longer than requested, up to a tenth of a second (`execution_size`).
_EXECUTIONS_PER_WORKER = 3
_LEAST_S = 0.5
_GIVE_UP_S = 1.0


class Trace(keras.callbacks.Callback):
    """Traces some steps of `fit`, on all tasks of the cluster, and reports what limits it.

    It writes one file for [Perfetto](https://ui.perfetto.dev). In it each worker has a track for
    data, pull, compute and push, and each ps has tracks for pulls, locks and pushes. It also
    writes the files of TensorFlow's profiler, so the profile page of TensorBoard shows all tasks.
    At the end of `fit` it prints the path of the file, and a sentence such as "Worker 0 waits for
    data 61% of the time."

    ```python
    # `model` is one of a `ParameterServerStrategy`.
    model.fit(
        np.ones((1000, 64)),
        np.ones(1000),
        epochs=3,
        callbacks=[kerasps.Trace("logs", first_step=20, num_steps=10)],
    )
    ```

    During the recording, which takes a minute at most, steps take slightly longer. Before and after
    that the callback costs nothing. If `fit` ends first, the file holds the steps until then.

    Args:
        log_dir: the directory for the files, for example TensorBoard's.
        first_step: the number of steps of this `fit`, by all workers, before the recording begins.
            Default 100, since the first steps prepare graphs.
        num_steps: the number of steps to record, of all workers together. Default 20.

    Raises:
        TypeError: `log_dir` is not a path, or a number is not an integer.
        ValueError: `first_step` is negative, or `num_steps` is not positive.
        UnsupportedError: in `fit`, if the model does not belong to a strategy with ps tasks.

    Attributes:
        report: the report of the trace (`file`, `num_steps`, `limit`, `shares`, `missing`); None
            until it is written.
    """

    # It does not count as a per-batch callback (see `batch_callbacks`).
    hears_now_and_then = True

    def __init__(
        self, log_dir: str | os.PathLike[str], *, first_step: int = 100, num_steps: int = 20
    ) -> None:
        super().__init__()
        self._log_dir = checks.path("log_dir", log_dir)
        self._first_step = _count("first_step", first_step, least=0)
        self._num_steps = _count("num_steps", num_steps, least=1)
        self.report: Report | None = None
        self._reset()

    def _reset(self) -> None:
        self._done = self._in_epoch = self._done_at_start = 0
        self._started_at = self._begun_at = 0.0
        self._has_begun = False
        self._recording: Recording | None = None
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None
        self._has_stopped = False

    def on_train_begin(self, logs: dict[str, object] | None = None) -> None:
        """Prepare for a new trace, and start it if `first_step` is 0."""
        strategy = getattr(self.model, "_distribute_strategy", None)
        if strategy is None or not hasattr(strategy, "description"):
            raise UnsupportedError(
                "There are no tasks to trace. Expected: a model of a `ParameterServerStrategy`. "
                f"Received: one of {type(strategy).__name__}. Use "
                "`keras.callbacks.TensorBoard(profile_batch=...)`."
            )
        self._reset()
        self.report = None
        # Tasks make one recording at a time, so a `fit` that fails must stop its recording.
        host_of(self.model).run_meter.when_fit_ends(self._give_up)
        self._addresses = dict(strategy.description.addresses)
        self._per_execution = int(self.model.steps_per_execution)
        if not self._first_step:
            self._start()

    def on_epoch_begin(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Reset the count of batches in the epoch."""
        self._in_epoch = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, object] | None = None) -> None:
        """Start or stop the recording when its step is reached."""
        self._done += batch + 1 - self._in_epoch
        self._in_epoch = batch + 1
        if self._has_stopped:
            return
        if self._recording is None:
            if self._done >= self._first_step:
                self._start()
            return
        if not self._has_begun:
            # On a busy machine, steps end before every task has received the request.
            self._has_begun = self._recording.has_begun
            self._done_at_start, self._begun_at = self._done, time.monotonic()
        elapsed = time.monotonic() - self._begun_at
        wanted = self._num_steps + self._in_flight()
        is_enough = self._done - self._done_at_start >= wanted and elapsed >= _LEAST_S
        if is_enough or time.monotonic() - self._started_at >= MAX_SECONDS:
            self._stop()

    def on_train_end(self, logs: dict[str, object] | None = None) -> None:
        """Stop, write the files, and print what limits the training."""
        if self._recording is None and self._error is None:
            warnings.warn(
                "Nothing was traced: `fit` ended before the first step to trace. Expected: more "
                f"than first_step={self._first_step} steps. Received: {self._done}. Trace "
                "earlier steps, or train longer.",
                UserWarning,
                stacklevel=2,
            )
            return
        self._stop()
        if self._writer is not None:
            self._writer.join()
        if self.report is not None:
            with contextlib.suppress(OSError):  # a full disk behind stdout
                print(self.report, flush=True)
            return
        # Only warn: the training is done, and its model is worth more than its trace.
        warnings.warn(
            f"The trace was not written. Expected: a directory with room at {self._log_dir}, and "
            f"recordings that can be read. Received: {self._error!r}. Give another `log_dir`.",
            UserWarning,
            stacklevel=2,
        )

    def _give_up(self) -> None:
        if self._recording is not None and not self._has_stopped:
            self._has_stopped = True
            # Drop it, with short time limits: `fit` may have failed because a task hangs.
            self._recording.stop(_GIVE_UP_S, _GIVE_UP_S)

    def _in_flight(self) -> int:
        workers = sum(job == "worker" for job, _ in self._addresses)
        number: int = _EXECUTIONS_PER_WORKER * workers * self._per_execution
        return number

    def _start(self) -> None:
        try:
            self._run = new_run(self._log_dir)
            recording = Recording(self._addresses, f"kerasps-{self._run}-{os.getpid()}")
            self._recording = recording
            recording.start()
        except Exception as exc:
            self._error, self._has_stopped = exc, True
        self._started_at = time.monotonic()

    def _stop(self) -> None:
        """Stop, once, and write the files in another thread."""
        if not self._has_stopped:
            self._has_stopped = True
            self._writer = threading.Thread(target=self._write, name="kerasps-trace", daemon=True)
            self._writer.start()

    def _write(self) -> None:
        assert self._recording is not None
        try:
            self._recording.stop()
            self.report = write_report(
                self._log_dir, self._run, self._addresses, self._recording, self._num_steps
            )
        except Exception as exc:
            self._error = exc


def _count(argument: str, value: object, *, least: int) -> int:
    return checks.count(
        f"Argument `{argument}` is not a number of steps",
        value,
        least=least,
        received=f"{argument}={value!r}",
        advice="Give a number like 20.",
    )
