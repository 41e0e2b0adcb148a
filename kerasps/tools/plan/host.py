"""The host of a strategy in a dry run: it connects to no task, and stops at the first step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import keras
import tensorflow as tf

from kerasps.base_host import BaseHost
from kerasps.coordinator_host import CoordinatorHost
from kerasps.inputs import Input
from kerasps.step import Mode, TracedStep
from kerasps.tools.plan.dry_run import FirstStepReached


@dataclass(frozen=True)
class FirstStep:
    """The first step that a script is about to run.

    Attributes:
        data: the data, or the batches of a method on one batch.
    """

    host: CoordinatorHost
    model: keras.Model
    mode: Mode
    function: TracedStep
    data: Input | Sequence[object]


class PlannedHost(CoordinatorHost):
    """The host of a strategy in a dry run; see `CoordinatorHost`.

    Attributes:
        num_made: the number of strategies that the script has made.
        at_first_step: called with the first step, before the script ends there.
    """

    num_made: ClassVar[int] = 0
    at_first_step: ClassVar[Callable[[FirstStep], None]]
    why_no_eager_steps = (
        "A model that is compiled with `run_eagerly=True` runs its steps in the coordinator's "
        "process, and not on workers. Expected: a model whose steps run on workers. "
        "Received: run_eagerly=True. Leave it out to plan the training."
    )

    def wait_for_tasks(self, timeout: float | None) -> None:
        """Return at once, since there are no tasks."""

    def connect(self, protocol: str | None) -> None:
        """Hide the GPUs, and connect to no task."""
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")

    def begin(self) -> None:
        """Start the meters, but watch no tasks."""
        BaseHost.begin(self)
        self.membership = self.make_membership()
        PlannedHost.num_made += 1

    def leave_cluster(self) -> None:
        """Do nothing, since there are no tasks."""

    def close(self, disconnect: Callable[[], None]) -> None:
        """Do nothing. Variables remain, since they are in this process."""

    def before_steps(
        self, model: keras.Model, mode: Mode, function: TracedStep, data: Input | Sequence[object]
    ) -> None:
        """Measure the first step, and end the script."""
        PlannedHost.at_first_step(FirstStep(self, model, mode, function, data))
        raise FirstStepReached
