"""Decides when to back up a `fit`, and resumes a new one from the last backup.

Keras's `BackupAndRestore` has the directory of backups and asks for some. Others are made at
intervals, and when the coordinator gets SIGTERM. A `BackupStore` writes them; the hook of the
callback makes it.
"""

from __future__ import annotations

import contextlib
import os
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np

from kerasps.checks import time_limit
from kerasps.errors import PSLostError, TaskLostError
from kerasps.inputs import Input
from kerasps.step import TracedStep
from kerasps.training.backup.callback_states import restore_states, states_of
from kerasps.training.contract.preemption import EXIT_CODE, Preempted, PreemptionNotice, ends_soon
from kerasps.training.loop.loop import Loop
from kerasps.training.loop.position import (
    CannotResumeError,
    LoopPosition,
    Position,
    global_seed_state,
    seed_states_of,
    set_global_seed_state,
)
from kerasps.variables import ParameterServerVariable
from kerasps.variables.lanes.flights import worker_timeout
from kerasps.words import say

# A loss costs at most a minute of work; a backup of a large model takes some seconds.
_INTERVAL_S = 60.0
# When `fit` ends in an error, a backup in progress gets this long.
_LAST_WRITE_S = 10.0


class BackupStore(Protocol):
    """Keeps the backups of one `BackupAndRestore`."""

    def restore(self, variables: list[ParameterServerVariable]) -> dict[str, Any] | None:
        """Restore the variables of the last backup; return its record, None if there is none.

        Pass the same `variables` as to `write`.
        """

    def write(self, record: dict[str, Any], variables: list[ParameterServerVariable]) -> None:
        """Copy the variables on their ps, and begin to write the copies with `record`.

        Returns when they are copied. Call when no step is in flight.

        Args:
            record: dictionaries and lists, of arrays and of values that JSON can represent.
            variables: all variables of a step, also those that the model does not know.
        """

    @property
    def is_writing(self) -> bool:
        """True while a backup is being written."""

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is being written; return False after `timeout` seconds."""

    def problems(self) -> list[str]:
        """Return the errors of writes since the last call, as text."""

    def last(self) -> str:
        """Return a sentence about the last complete backup."""


def backup_interval() -> float | None:
    """Return the seconds between backups: KERASPS_BACKUP_INTERVAL, else 60; None if it is 0."""
    variable = "KERASPS_BACKUP_INTERVAL"
    if os.environ.get(variable, "").strip() == "0":
        return None
    return time_limit(None, variable=variable, default=_INTERVAL_S)


@dataclass(eq=False)
class _Kept:
    """A callback, the store of its backups, and the time of the next one."""

    callback: keras.callbacks.BackupAndRestore
    store: BackupStore
    interval: float | None
    due_at: float = 0.0
    is_asked: bool = False
    # The counted steps of the training at the last backup.
    counted: int = 0

    def __post_init__(self) -> None:
        self.begin_interval(0)

    def begin_interval(self, counted: int) -> None:
        self.is_asked, self.counted = False, counted
        self.due_at = time.monotonic() + (self.interval or 0.0)

    def is_due(self, counted: int) -> bool:
        if self.is_asked:
            return True
        is_time = self.interval is not None and time.monotonic() >= self.due_at
        # Without a new step, a backup would be the same. And each backup ends the sessions, which
        # could then never finish opening their data.
        return is_time and counted > self.counted and not self.store.is_writing


_running: list[FitBackups] = []


def running_fit(model: object) -> FitBackups | None:
    """Return the backups of the current `fit` of a model on workers; None without one."""
    return next((fit for fit in reversed(_running) if fit.model is model), None)


class FitBackups:
    """The backups of one `fit`.

    Contract: enter it for the time of the `fit`. Call `resume` when the training has begun,
    `at_turn` between two reports of its loop, `at_epoch_end` after all callbacks' `on_epoch_end`,
    and `finish` before their `on_train_end`. Thread: `fit`'s.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: keras.callbacks.CallbackList,
        function: TracedStep,
        validation: Input | None,
    ) -> None:
        self.model = model
        self.epoch = 0  # the number of the current epoch
        self._callbacks = callbacks.callbacks
        self._variables = function.variables
        self._validation = validation
        self._kept: list[_Kept] = []
        self._restored: Position | None = None
        self._initial_epoch = model._initial_epoch
        self._notice = PreemptionNotice()

    def __enter__(self) -> FitBackups:
        _running.append(self)
        if any(isinstance(c, keras.callbacks.BackupAndRestore) for c in self._callbacks):
            self._notice.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        _running.remove(self)
        ends = ends_soon()
        self._notice.uninstall()
        if self._restored is not None:
            self.model._initial_epoch = self._initial_epoch  # the next `fit` has an epoch 0 again
        is_ps_lost = isinstance(error, PSLostError)
        for kept in self._kept:
            # A lost ps completes no backup.
            kept.store.wait(0.0 if is_ps_lost else _LAST_WRITE_S)
        if error is None and self._notice.is_given:
            self._notice.answer()
        elif isinstance(error, TaskLostError) and ends:
            self._tell_last(str(error))
            raise SystemExit(EXIT_CODE) from error

    def _tell_last(self, error: str) -> None:
        """Print which backups are there, for a process that ends without a further one."""
        found = " ".join(kept.store.last() for kept in self._kept)
        what = error.partition(". Expected: ")[0]
        say(f"kerasps: SIGTERM came, and no further backup can be made: {what}. {found}")

    # Called by the hooks of `BackupAndRestore`

    def begin(
        self, callback: keras.callbacks.BackupAndRestore, store: BackupStore, *, restores: bool
    ) -> bool:
        """Keep the backups of a callback in `store`; return whether one was restored from it.

        With `restores=False`, restore none.
        """
        interval = getattr(callback, "interval_s", None)
        if interval is None and callback.save_freq == "epoch":
            interval = backup_interval()
        record = store.restore(self._variables) if restores else None
        if record is not None and self._restored is None:
            self._restored = Position.from_record(record)
            self.model._initial_epoch = self._restored.epoch
        self._kept.append(_Kept(callback, store, interval))
        return record is not None

    def ask(self, callback: keras.callbacks.BackupAndRestore) -> None:
        """Request a backup at the next point where no callback is about to change the state.

        Ignored with `save_freq=False`: Keras takes it for 0 and would ask after every batch.
        """
        if callback.save_freq is False:
            return
        for kept in self._kept:
            kept.is_asked = kept.is_asked or kept.callback is callback

    # Called by `fit`

    def resume(self, loop: Loop) -> int | None:
        """Set the loop, seeds and callbacks to the state of the restored backup.

        Returns the number of the epoch to begin with; None if nothing was restored.
        """
        position = self._restored
        if position is None:
            loop.restart_numbers()
            return None
        for variable, state in zip(self._seed_states(), position.seed_states, strict=False):
            variable.assign(state)
        if position.global_seed_state is not None:
            set_global_seed_state(position.global_seed_state)
        if self._validation is not None and position.validation is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # the data are others
                self._validation.resume_order(position.validation, passes_to_repeat=0)
        restore_states(self._callbacks, position.callbacks)
        loop.restart_numbers()
        try:
            loop.resume(position.loop)
        except CannotResumeError as exc:
            warnings.warn(
                f"The backup of a training cannot be resumed within epoch {position.epoch + 1}: "
                f"{exc}. Its variables are restored, after {position.loop.steps} steps of that "
                "epoch, and the epoch begins with its first step. Expected: the same input, "
                "metrics and number of workers as before.",
                stacklevel=5,
            )
        else:
            self._show_callbacks(position)
        return position.epoch

    def _show_callbacks(self, position: Position) -> None:
        # From these attributes, the callbacks count the batches since their last backup.
        for kept in self._kept:
            kept.callback._current_epoch = position.epoch
            kept.callback._last_batch_seen = max(0, position.loop.steps - 1)

    def at_turn(self, loop: Loop) -> None:
        """Make the backups that are due, within an epoch; answer a notice of preemption.

        Raises SystemExit if SIGTERM came and nobody handles it. The code is 143.
        """
        self._make_due(self.epoch, loop, loop.drain)

    def at_epoch_end(self, loop: Loop) -> None:
        """Do the same as `at_turn`, between the end of an epoch and the begin of the next one."""
        self._make_due(self.epoch + 1, loop, lambda: loop.position(in_epoch=False))

    def stop_if_preempted(self) -> None:
        """Raise `Preempted` if a notice was given that ends the process."""
        if self._notice.is_given and self._notice.ends_process:
            raise Preempted

    @contextlib.contextmanager
    def in_validation(self, loop: Loop) -> Iterator[None]:
        """Let `stop_if_preempted` end the validation within this context, then make a backup.

        The resumed training validates again.
        """
        try:
            yield
        except Preempted:
            self._make_due(self.epoch, loop, lambda: loop.position(in_epoch=True))

    def finish(self) -> None:
        """Wait for a backup in progress, before callbacks delete it."""
        for kept in self._kept:
            kept.store.wait(worker_timeout())
        self._tell_problems()

    def _make_due(self, epoch: int, loop: Loop, loop_position: Callable[[], LoopPosition]) -> None:
        self._tell_problems()
        is_notice = self._notice.is_given
        if not is_notice and not any(kept.is_due(loop.num_counted) for kept in self._kept):
            return
        position = loop_position()
        # Callbacks may have asked for backups while `loop_position` counted the last steps.
        due = [kept for kept in self._kept if is_notice or kept.is_due(loop.num_counted)]
        record = self._position(epoch, position).to_record()
        for kept in due:
            kept.store.write(record, self._variables)
            kept.begin_interval(loop.num_counted)
        if is_notice:
            self.finish()
            self._notice.answer()

    def _position(self, epoch: int, loop_position: LoopPosition) -> Position:
        validation = self._validation
        return Position(
            epoch=epoch,
            loop=loop_position,
            validation=None if validation is None else validation.position(in_epoch=False),
            seed_states=[np.asarray(state) for state in self._seed_states()],
            global_seed_state=global_seed_state(),
            callbacks=states_of(self._callbacks),
        )

    def _seed_states(self) -> list[ParameterServerVariable]:
        return seed_states_of(self.model, self._variables)

    def _tell_problems(self) -> None:
        for kept in self._kept:
            for problem in kept.store.problems():
                warnings.warn(problem, stacklevel=5)
