"""Keeps account of which ps holds which variable, and reports it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import tensorflow as tf

from kerasps.cluster import ps_device


@dataclass(frozen=True)
class TaskPlacement:
    """The variables of one ps task.

    Args:
        device: the name of the ps's device.
        num_variables: the number of variables on it; a shard counts as one.
        num_bytes: their bytes.
        names: their names, without order.
    """

    device: str
    num_variables: int
    num_bytes: int
    names: tuple[str, ...]


class Placement(Sequence[TaskPlacement]):
    """The variables of every ps task, a `TaskPlacement` each, in task order; prints as a table.

    ```python
    print(strategy.placement())
    largest = max(task.num_bytes for task in strategy.placement())
    ```

    Args:
        tasks: the variables of each ps.
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
        """The bytes of all variables on all ps tasks."""
        return sum(task.num_bytes for task in self._tasks)

    def __repr__(self) -> str:
        num_variables = sum(task.num_variables for task in self)
        return (
            f"<Placement of {num_variables} variables, {self.num_bytes:,} bytes on {len(self)} ps>"
        )

    def __str__(self) -> str:
        rows = [("ps", "variables", "bytes", "share", "device")]
        for index, task in enumerate(self._tasks):
            share = task.num_bytes / self.num_bytes if self.num_bytes else 0.0
            rows.append(
                (
                    str(index),
                    str(task.num_variables),
                    f"{task.num_bytes:,}",
                    f"{share:.1%}",
                    task.device,
                )
            )
        return text_table(rows)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as an aligned table; all columns but the last are numbers."""
    last = len(rows[0]) - 1
    widths = [max(len(row[column]) for row in rows) for column in range(last)]
    return "\n".join(
        "  ".join(
            [
                *(cell.rjust(width) for cell, width in zip(row[:last], widths, strict=True)),
                row[last],
            ]
        )
        for row in rows
    )


class PlacementLedger:
    """The variables that live on each ps now, and the ps that takes the next one."""

    def __init__(self, num_ps: int) -> None:
        self._variables: list[dict[int, tuple[str, int]]] = [{} for _ in range(num_ps)]

    def lightest(self) -> int:
        """Return the index of the ps with the fewest bytes; of several, the lowest."""
        return min(range(len(self._variables)), key=self._bytes_and_index)

    def spread(self, num_shards: int) -> list[int]:
        """Return the ps of each of `num_shards` shards of one variable, the lightest first.

        They are as many different ps as there are.
        """
        by_bytes = sorted(range(len(self._variables)), key=self._bytes_and_index)
        return [by_bytes[shard % len(by_bytes)] for shard in range(num_shards)]

    def add(self, variable: tf.Variable) -> None:
        """Count `variable` until it is collected; one that is on no ps is not counted."""
        spec = tf.DeviceSpec.from_string(variable.device)
        if spec.job != "ps":
            return
        held = self._variables[spec.task]
        # Not the variable itself, which would never be collected.
        held[id(variable)] = (variable.name, math.prod(variable.shape) * variable.dtype.size)
        weakref.finalize(variable, held.pop, id(variable), None)

    def placement(self) -> Placement:
        """Return the account as it is now."""
        return Placement(
            [
                TaskPlacement(
                    ps_device(ps),
                    len(held),
                    self._bytes(ps),
                    tuple(name for name, _ in held.values()),
                )
                for ps, held in enumerate(self._variables)
            ]
        )

    def _bytes(self, ps: int) -> int:
        # A copy: Python may collect a variable, and take it off, in the middle of the sum.
        return sum(num_bytes for _, num_bytes in list(self._variables[ps].values()))

    def _bytes_and_index(self, ps: int) -> tuple[int, int]:
        return self._bytes(ps), ps
