"""The time that a step takes, as measured."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class StepTiming:
    """The number of times that a step was done and the time that it takes a worker.

    Attributes:
        epochs: the epochs that were begun.
        steps: the steps that were done.
        seconds: the least seconds per step that were measured; infinite before.
    """

    epochs: int = 0
    steps: int = 0
    seconds: float = math.inf
