"""What is known of how long a step takes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class StepTiming:
    """How long a step takes a worker, as whoever drives it has noted.

    Attributes:
        steps: the steps that were done.
        seconds: the least seconds per step that were measured; infinite before.
    """

    steps: int = 0
    seconds: float = math.inf
