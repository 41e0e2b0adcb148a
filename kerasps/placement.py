"""Which ps holds which variable."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import tensorflow as tf

# The coordinator's job as TensorFlow knows it. Any other name than this, which every process begins with, would make TensorFlow
# forget what the process has made before it connects.
COORDINATOR_JOB = "localhost"
COORDINATOR_CPU = f"/job:{COORDINATOR_JOB}/replica:0/task:0/device:CPU:0"


@dataclass(frozen=True)
class TaskPlacement:
    """What one ps task holds: its device, the number of variables, their bytes and their names."""

    device: str
    num_variables: int
    num_bytes: int
    names: tuple[str, ...]


class Placement(Sequence[TaskPlacement]):
    """What every ps task holds, in task order; prints as a table.

    ```python
    print(strategy.placement())
    largest = max(task.num_bytes for task in strategy.placement())
    ```
    """

    def __init__(self, tasks: Sequence[TaskPlacement]) -> None:
        self._tasks = tuple(tasks)

    @overload
    def __getitem__(self, index: int) -> TaskPlacement: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TaskPlacement]: ...

    def __getitem__(self, index: int | slice) -> TaskPlacement | Sequence[TaskPlacement]:
        return self._tasks[index]

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all variables on all ps tasks."""
        return sum(task.num_bytes for task in self._tasks)

    def __repr__(self) -> str:
        return f"<Placement of {sum(t.num_variables for t in self)} variables, {self.num_bytes:,} bytes on {len(self)} ps>"

    def __str__(self) -> str:
        rows = [("ps", "variables", "bytes", "share", "device")]
        for index, task in enumerate(self._tasks):
            share = task.num_bytes / self.num_bytes if self.num_bytes else 0.0
            rows.append((str(index), str(task.num_variables), f"{task.num_bytes:,}", f"{share:.1%}", task.device))
        return text_table(rows)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as an aligned table; all columns but the last are numbers."""
    last = len(rows[0]) - 1
    widths = [max(len(row[column]) for row in rows) for column in range(last)]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row[:last], widths, strict=True)), row[last]]) for row in rows
    )


def ps_device(index: int) -> str:
    """The device of a ps task on which variables live."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


def ps_index(device: str) -> int:
    """The index of the ps task of a device; the other way round."""
    return int(tf.DeviceSpec.from_string(device).task)


class PlacementLedger:
    """The variables that live on each ps now, and the ps that takes the next one."""

    def __init__(self, num_ps: int) -> None:
        self._variables: list[dict[int, tuple[str, int]]] = [{} for _ in range(num_ps)]

    def lightest(self) -> int:
        """The index of the ps with the fewest bytes."""
        return min(range(len(self._variables)), key=lambda ps: (self._load(ps), ps))

    def spread(self, num_shards: int) -> list[int]:
        """The ps of each of `num_shards` shards of one variable: as many different ones as there are, the lightest first."""
        count = len(self._variables)
        by_load = sorted(range(count), key=lambda ps: (self._load(ps), ps))
        return [by_load[shard % count] for shard in range(num_shards)]

    def add(self, variable: tf.Variable) -> None:
        """Counts `variable` until it is collected."""
        spec = tf.DeviceSpec.from_string(variable.device)
        if spec.job != "ps":
            return
        held = self._variables[spec.task]
        held[id(variable)] = (variable.name, math.prod(variable.shape) * variable.dtype.size)
        weakref.finalize(variable, held.pop, id(variable), None)

    def placement(self) -> Placement:
        """What the ledger says now."""
        return Placement(
            [
                TaskPlacement(
                    ps_device(ps),
                    len(held),
                    self._load(ps),
                    tuple(name for name, _ in held.values()),
                )
                for ps, held in enumerate(self._variables)
            ]
        )

    def _load(self, ps: int) -> int:
        return sum(num_bytes for _, num_bytes in list(self._variables[ps].values()))
