"""The measured time of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class StepTiming:
    """The number of steps that were done, and the time that one takes on a worker."""

    epochs: int = 0
    steps: int = 0
    # The shortest measured time per step, in seconds; infinite before the first.
    seconds: float = math.inf
