"""What is known of how long a step takes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class StepTiming:
    """How often a step was done and how long it takes a worker, as whoever drives it has noted.

    Attributes:
        epochs: the epochs that were begun.
        steps: the steps that were done.
        seconds: the least seconds per step that were measured; infinite before.
    """

    epochs: int = 0
    steps: int = 0
    seconds: float = math.inf
