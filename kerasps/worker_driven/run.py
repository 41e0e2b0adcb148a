"""The state that the processes of a run share beside the model: chief, names, readiness.

A ps, with its variables, may outlive a run, and another run may follow. So all names on ps begin
with the id of the run, an argument of each process, and the number of the run of that id. The chief
counts the runs. A chief that comes back during its run joins it again.
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
# The same time as for a lost worker: the cluster may have to schedule the chief, which may then
# load a checkpoint.
_TIMEOUT_S = 600.0
# A chief that starts together with the others needs less. The time doubles with each message.
_SAY_AFTER_S = 10.0
# A wait makes a call to a ps at this interval; it is short against a start.
_POLL_S = 0.05
# The distance between the seeds of processes. A prime, so that no two processes meet soon.
_SEED_STEP = 15_485_863


def check_run(run_id: str | None, timeout: float | None) -> float:
    """Check the arguments of a run, and return the seconds to wait for its chief."""
    if run_id is not None and not isinstance(run_id, str):
        raise TypeError(
            "Argument `run_id` is not a name. Expected: a string, the same in all workers of a "
            f"run, or None. Received: run_id={run_id!r}. Give one like 'run-1'."
        )
    return time_limit(
        timeout, variable=_TIMEOUT_VARIABLE, default=_TIMEOUT_S, argument="chief_timeout"
    )


class Run:
    """The run that this process takes part in.

    Args:
        run_id: its id; None for KERASPS_RUN_ID, else `"run"`.
        is_chief: whether this process gives the initial values.
        chief: the name and the address of the chief, for messages.
        timeout: seconds to wait for the chief; None for KERASPS_CHIEF_TIMEOUT, else 600.
    """

    def __init__(
        self, run_id: str | None, *, is_chief: bool, chief: str, timeout: float | None
    ) -> None:
        self._run_id = run_id or os.environ.get(RUN_ID_VARIABLE) or "run"
        self.is_chief = is_chief
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
        """Begin the run, or join it. Call once the process is connected."""
        self._mutex = mutex
        self._run = Cell(f"kerasps/runs/{self._run_id}", tf.int64, self._device)
        if self.is_chief:
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
        # The process that begins the run draws the seeds of plain Keras; others draw other seeds.
        self.seed_offset = 0 if self.is_chief and self._is_new else arrivals * _SEED_STEP

    def finish(self) -> None:
        """Note that the run has ended, so that the next chief begins another. Call in the chief."""
        self._run.set(-self._number)

    @property
    def is_new(self) -> bool:
        """True if this process is the chief and has begun the run, not joined it again."""
        return self.is_chief and self._is_new

    @property
    def writes(self) -> bool:
        """True if values that this process assigns outside of steps are written.

        Only the chief writes, since each worker runs the same program and assigns the same. A chief
        that comes back writes again once it has begun with steps.
        """
        return self.is_chief and (self._is_new or self._has_begun)

    # Names

    def name_of(self, name: str, kind: Hashable) -> str:
        """Return the name of a new variable on its ps: the next one of that name and kind."""
        number = self._counts[name, kind]
        self._counts[name, kind] += 1
        return self._named(f"{name} {kind} {number}")

    def cell(self, name: str, dtype: tf.DType) -> Cell:
        """Return the cell with a name, on the first ps."""
        return Cell(self._named(name), dtype, self._device)

    def shared_sum(self, name: str, length: int, num_maxima: int = 0) -> SharedSum:
        """Return the sum with a name, on the first ps."""
        return SharedSum(self._named(name), length, num_maxima, self._device, self._mutex)

    def _named(self, name: str) -> str:
        return f"kerasps/{self._run_id}/{self._number}/{name}"

    # Readiness

    def is_ready(self, variable: tf.Variable) -> bool:
        """Return whether the chief has marked a variable as ready, with its initial value."""
        return self._flag(variable).is_set

    def begin_steps(self, variables: Sequence[tf.Variable]) -> None:
        """Mark variables as ready, with their initial values, or wait until the chief does."""
        new = [v for v in variables if v.shared_name not in self._ready]
        for variable in new:
            if self.is_chief:
                self._flag(variable).set(True)
            else:
                self._wait_for_flag(variable)
            self._ready.add(variable.shared_name)
        self._has_begun = True

    def wait_for_value(self, variable: tf.Variable) -> None:
        """Wait until a variable has a value."""
        self._wait(
            lambda: bool(variable.is_initialized()),
            f"to give the variable '{variable.name}' its initial value",
        )

    def agreed(self, name: str, make: Callable[[], object]) -> Any:
        """Return a value that the chief makes once, and all processes read by `name`."""
        cell = self.cell(name, tf.string)
        if self.is_chief and not cell.is_set:
            cell.set(json.dumps(make()))
        self._wait(lambda: cell.is_set, f"to set the shared value '{name}'")
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
                text = "Waited %.0f s, of at most %.0f s, for the chief of this run, %s, %s."
                _LOGGER.warning(text, waited, self._timeout, self._chief, what)
            if waited > tell_after:
                tell_after += TELL_ABSENT_EVERY_S
                # The supervisor that started the chief may know that it is lost.
                tell_supervisor("absent", "worker", 0)
            if time.monotonic() > deadline:
                raise TaskUnreachableError(
                    f"The chief of this run, {self._chief}, did not answer: it had {what}. "
                    f"Expected: within {self._timeout:g} s. Received: nothing. Start it, with the "
                    f"same run id ('{self._run_id}'), or allow more time with {_TIMEOUT_VARIABLE} "
                    "(seconds)."
                )
            time.sleep(_POLL_S)
