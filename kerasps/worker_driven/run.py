"""The state that the processes of a run share beside the model: chief, names, readiness.

A ps may outlive a run, with its variables, and another run may come. So all names on ps begin with
those of the run: an id, which each process is given, and the number of the run of that id. The
chief counts the runs. A chief that comes back while its run goes on attaches to it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from kerasps.checks import time_limit
from kerasps.errors import TaskUnreachableError
from kerasps.runtime.devices import ps_device
from kerasps.runtime.supervision import TELL_ABSENT_EVERY_S, tell_supervisor
from kerasps.worker_driven.cells import Cell, SharedSum

_LOGGER = logging.getLogger("kerasps")

RUN_ID_VARIABLE = "KERASPS_RUN_ID"
_TIMEOUT_VARIABLE = "KERASPS_CHIEF_TIMEOUT"
# As long as a lost worker gets: the chief may have to be scheduled, and to load what it begins
# with.
_TIMEOUT_S = 600.0
# Longer than a chief takes that starts together with the others; then twice as long each time.
_SAY_AFTER_S = 10.0
# A wait costs each ps a call as often; a start does not notice it.
_POLL_S = 0.05
# Seeds of processes are so far apart. A prime, so that no two meet soon.
_SEED_STEP = 15_485_863


def check_run(run_id: str | None, timeout: float | None) -> float:
    """Check the arguments of a run, and return the seconds to wait for its chief.

    Raises:
        TypeError: `run_id` is not a name.
        ValueError: `timeout` is not a time limit.
    """
    if run_id is not None and not isinstance(run_id, str):
        raise TypeError(
            "Argument `run_id` is not a name. Expected: a string that the workers of a run have in "
            f"common, or None. Received: run_id={run_id!r}. Give one like 'run-1'."
        )
    return time_limit(
        timeout, variable=_TIMEOUT_VARIABLE, default=_TIMEOUT_S, argument="chief_timeout"
    )


class Run:
    """The run that this process takes part in.

    Args:
        run_id: its id; None for the one of KERASPS_RUN_ID, else `"run"`.
        is_chief: whether this process gives the initial values.
        chief: in words, which task is the chief, and where.
        timeout: seconds to wait for the chief; None for KERASPS_CHIEF_TIMEOUT, else 600.
    """

    def __init__(
        self, run_id: str | None, *, is_chief: bool, chief: str, timeout: float | None
    ) -> None:
        self._run_id = run_id or os.environ.get(RUN_ID_VARIABLE) or "run"
        self._is_chief = is_chief
        self._chief = chief
        self._timeout = check_run(run_id, timeout)
        self._device = ps_device(0)
        self._counts: Counter[Any] = Counter()
        self._ready: set[str] = set()
        self._has_begun = False
        self._number = 0
        self._is_new = True
        self.num_fits = 0
        self.seed_offset = 0

    def open(self, mutex: Callable[[str], tf.Tensor]) -> None:
        """Begin the run, or take part in it. Call once the process is connected.

        Args:
            mutex: returns the lock of a device, by the device's name.

        Raises:
            TaskUnreachableError: the chief did not begin it in time.
        """
        self._mutex = mutex
        self._run = Cell(f"kerasps/runs/{self._run_id}", tf.int64, self._device)
        if self._is_chief:
            number = int(self._run.value) if self._run.is_set else 0
            self._is_new = number <= 0
            self._number = 1 - number if self._is_new else number
            self._run.set(self._number)
        else:
            self._wait(
                lambda: self._run.is_set and int(self._run.value) > 0,
                "to begin the run. The last run, if there was one, has ended",
            )
            self._number = int(self._run.value)
        arrivals = int(self.shared_sum("arrivals", 1).add([1])[0])
        # The process that begins draws what one process alone would draw, and no two the same.
        self.seed_offset = 0 if self._is_chief and self._is_new else arrivals * _SEED_STEP

    def finish(self) -> None:
        """Note that the run has ended: the next chief begins another. Call in the chief."""
        self._run.set(-self._number)

    @property
    def is_chief(self) -> bool:
        """True if this process gives initial values, writes files, and merges metrics."""
        return self._is_chief

    @property
    def is_new(self) -> bool:
        """True if this process began the run, and no other knows its variables yet."""
        return self._is_chief and self._is_new

    @property
    def writes(self) -> bool:
        """True if values that this process assigns outside of steps are written.

        The chief alone writes: each worker runs the same program, and does the same again. One that
        comes back writes when it has come to the steps that the run is in.
        """
        return self._is_chief and (self._is_new or self._has_begun)

    # Names

    def name_of(self, name: str, kind: Hashable) -> str:
        """Return the name on its ps of a new variable: the next one of that name and kind."""
        number = self._counts[name, kind]
        self._counts[name, kind] += 1
        return self._named(f"{name} {kind} {number}")

    def cell(self, name: str, dtype: tf.DType) -> Cell:
        """Return the cell of a name, on the first ps."""
        return Cell(self._named(name), dtype, self._device)

    def shared_sum(self, name: str, length: int) -> SharedSum:
        """Return the sum of a name, on the first ps."""
        return SharedSum(self._named(name), length, self._device, self._mutex)

    def _named(self, name: str) -> str:
        return f"kerasps/{self._run_id}/{self._number}/{name}"

    # What is ready

    def is_ready(self, variable: tf.Variable) -> bool:
        """Return whether the chief has said that a variable has its initial value."""
        return self._flag(variable).is_set

    def begin_steps(self, variables: Sequence[tf.Variable]) -> None:
        """Say that variables have their initial values, or wait until the chief says so.

        Raises:
            TaskUnreachableError: the chief does not say so in time.
        """
        new = [v for v in variables if v.shared_name not in self._ready]
        for variable in new:
            if self._is_chief:
                self._flag(variable).set(True)
            else:
                self._wait_for_flag(variable)
            self._ready.add(variable.shared_name)
        self._has_begun = True

    def wait_for_value(self, variable: tf.Variable) -> None:
        """Wait until a variable has a value.

        Raises:
            TaskUnreachableError: it has none in time.
        """
        self._wait(
            lambda: bool(variable.is_initialized()),
            f"to give the variable '{variable.name}' its initial value",
        )

    def agreed(self, name: str, make: Callable[[], object]) -> Any:
        """Return a value that the chief makes, once, and all processes know by `name`.

        Args:
            name: its name.
            make: returns the value, which JSON can hold. Called in the chief alone.

        Raises:
            TaskUnreachableError: the chief did not make it in time.
        """
        cell = self.cell(name, tf.string)
        if self._is_chief and not cell.is_set:
            cell.set(json.dumps(make()))
        self._wait(lambda: cell.is_set, f"to say what '{name}' is")
        return json.loads(cell.value)

    def _flag(self, variable: tf.Variable) -> Cell:
        return Cell(f"{variable.shared_name}/ready", tf.bool, str(variable.device))

    def _wait_for_flag(self, variable: tf.Variable) -> None:
        flag = self._flag(variable)
        self._wait(
            lambda: flag.is_set,
            f"to give the variable '{variable.name}' of shape {tuple(variable.shape)} its initial "
            "value, and to begin with steps. Each worker must run the same program, which makes "
            "the same variables in the same order",
        )

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        began = time.monotonic()
        deadline, say_after = began + self._timeout, _SAY_AFTER_S
        tell_after = TELL_ABSENT_EVERY_S
        while not condition():
            waited = time.monotonic() - began
            if waited > say_after:
                say_after *= 2
                text = (
                    "Waiting since %.0f s, for %.0f s at most, for the chief of this run, %s, %s."
                )
                _LOGGER.warning(text, waited, self._timeout, self._chief, what)
            if waited > tell_after:
                tell_after += TELL_ABSENT_EVERY_S
                # Whoever started the chief may know that it does not come.
                tell_supervisor("absent", "worker", 0)
            if time.monotonic() > deadline:
                raise TaskUnreachableError(
                    f"The chief of this run, {self._chief}, was waited for in vain: it was {what}. "
                    f"Expected: within {self._timeout:g} s. Received: nothing. Start it, with the "
                    f"same run id ('{self._run_id}'), or allow more time with {_TIMEOUT_VARIABLE} "
                    "(seconds)."
                )
            time.sleep(_POLL_S)
