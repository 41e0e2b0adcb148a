"""The callback that writes what changed, for servers."""

from __future__ import annotations

import os
import threading
import time
import warnings
from typing import Any, Literal

import keras
import ml_dtypes

from kerasps import checks
from kerasps.base_strategy import BaseStrategy
from kerasps.errors import InputError
from kerasps.saving.model_deltas import ModelDeltas, Values
from kerasps.serving.tensor_files import check_installed
from kerasps.training.contract.host import host_of


class DeltaExport(keras.callbacks.Callback):
    """Writes what changed in a model into a directory, again and again while it trains.

    `kerasps.serving.Follower` and other servers apply the files within seconds. First comes a base,
    which has all rows and weights. Each further *delta* has the rows that changed since the last
    one, the ids that were removed, and the weights that changed. `docs/delta_files.md` describes
    the files.

    ```python
    export = kerasps.DeltaExport("deltas", every_seconds=1)
    model.fit(np.ones((1000, 64)), np.ones(1000), callbacks=[export])
    ```

    Steps in flight end before the weights are read. Rows of tables on ps are read in a thread while
    the training goes on, so they may be newer than the weights by some steps. The last delta of a
    `fit` has all as `fit` leaves it. If a delta cannot be written, a warning says why, the training
    goes on, and the next delta has its changes too.

    A later process goes on with the chain in the directory, if the ps still have the table. Else it
    begins another chain, and so does a chain of 100 deltas that are larger than their base.

    Args:
        directory: a directory for the deltas of this training alone, on a local or mounted file
            system. It is made if it does not exist.
        every_seconds: the seconds between two deltas. Give this or `every_steps`.
        every_steps: the steps between two deltas. They may come some steps late.
        dtype: `"bfloat16"` rounds rows to half their bytes. Default None: rows as they are.
            Weights are never rounded.
        keep: the number of chains that stay in the directory. Default 2.

    Raises:
        TypeError: an argument is not of its type.
        ValueError: an argument is out of its range.
        InputError: not exactly one of `every_seconds` and `every_steps` is given.
        ImportError: the package `safetensors` is not installed.
    """

    # It does not count as a per-batch callback (see `batch_callbacks`).
    hears_now_and_then = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_seconds: float | None = None,
        every_steps: int | None = None,
        dtype: Literal["bfloat16"] | None = None,
        keep: int = 2,
    ) -> None:
        super().__init__()
        self.directory = checks.path("directory", directory, advice="Give one like 'deltas'.")
        if (every_seconds is None) == (every_steps is None):
            raise InputError(
                "A DeltaExport needs a time between two deltas. Expected: `every_seconds` or "
                f"`every_steps`. Received: every_seconds={every_seconds!r} and "
                f"every_steps={every_steps!r}. Give one like `every_seconds=1`."
            )
        if every_seconds is not None:
            every_seconds = checks.seconds(
                "Argument `every_seconds` is not a time",
                every_seconds,
                received=f"every_seconds={every_seconds!r}",
                advice="Give a number like 1.",
            )
        if every_steps is not None:
            every_steps = checks.count(
                "Argument `every_steps` is not a number of steps",
                every_steps,
                received=f"every_steps={every_steps!r}",
                advice="Give a number like 100.",
            )
        if dtype is not None:
            checks.choice("dtype", dtype, ["bfloat16"])
        self.every_seconds, self.every_steps, self.dtype = every_seconds, every_steps, dtype
        self.keep = checks.count(
            "Argument `keep` is not a number of chains", keep, received=f"keep={keep!r}"
        )
        check_installed()
        self._reset()

    def _reset(self) -> None:
        self._deltas: ModelDeltas | None = None
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None
        self._before_epoch = self._steps = 0
        self._last_steps, self._last_time = 0, 0.0

    def __getstate__(self) -> dict[str, Any]:
        # A copy is for another `fit`.
        return {
            **self.__dict__,
            **{"_deltas": None, "_writer": None, "_error": None, "_model": None},
        }

    def on_train_begin(self, logs: object = None) -> None:
        """Go on with the chain in the directory, or begin one."""
        if self._deltas is None or self._deltas.model is not self.model:
            self._reset()
            row_dtype = None if self.dtype is None else ml_dtypes.bfloat16
            self._deltas = ModelDeltas(self.model, self.directory, self.keep, row_dtype)
        if isinstance(self.model._distribute_strategy, BaseStrategy):
            # The thread of a `fit` that ends in an error ends before the cluster does.
            host_of(self.model).run_meter.when_fit_ends(self._wait)
        self._begin()

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Note the steps of earlier epochs."""
        self._before_epoch = self._steps

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Begin a delta if it is due."""
        self._steps = self._before_epoch + batch + 1
        if self.every_steps is not None:
            is_due = self._steps - self._last_steps >= self.every_steps
        else:
            assert self.every_seconds is not None
            is_due = time.monotonic() - self._last_time >= self.every_seconds
        if is_due and (self._writer is None or not self._writer.is_alive()):
            self._begin()

    def on_train_end(self, logs: object = None) -> None:
        """Write the last delta."""
        self._wait()
        self._tell()
        assert self._deltas is not None
        self._write(self._deltas.read())
        self._tell()

    def _begin(self) -> None:
        self._wait()
        self._tell()
        assert self._deltas is not None
        self._last_steps, self._last_time = self._steps, time.monotonic()
        read = self._deltas.read()
        if not isinstance(self.model._distribute_strategy, BaseStrategy):
            # The tables of this process change in the thread of `fit`.
            self._write(read)
            return
        self._writer = threading.Thread(
            target=self._write, args=(read,), name="kerasps-deltas", daemon=True
        )
        self._writer.start()

    def _write(self, read: Values) -> None:
        assert self._deltas is not None
        try:
            self._deltas.write(read)
        except Exception as exc:
            self._error = exc

    def _wait(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.join()

    def _tell(self) -> None:
        """Warn of a delta that was not written."""
        error, self._error = self._error, None
        if error is not None:
            warnings.warn(
                f"A delta was not written into {self.directory}; the training goes on, and the "
                f"next delta has its changes too. {type(error).__name__}: {error}",
                UserWarning,
                stacklevel=3,
            )
