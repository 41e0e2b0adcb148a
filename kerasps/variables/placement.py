"""Keeps account of which ps holds which variable, and reports it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import tensorflow as tf

from kerasps.runtime.devices import ps_device


@dataclass(frozen=True)
class LookedUp:
    """The variables that steps read by rows only, with those that they read whole for being small.

    Args:
        tables: the names of those of which rows are fetched.
        small: the names of those that are fetched whole, since they are small.
        table_bytes: the bytes of the tables.
        small_bytes: the bytes of the small ones.
    """

    tables: tuple[str, ...] = ()
    small: tuple[str, ...] = ()
    table_bytes: int = 0
    small_bytes: int = 0

    def __str__(self) -> str:
        lines = []
        if self.tables:
            lines.append(f"by rows: {_of(self.tables)}, {self.table_bytes:,} bytes")
        if self.small:
            lines.append(
                f"looked up, and whole for being small: {_of(self.small)}, {self.small_bytes:,} "
                "bytes"
            )
        return "\n".join(lines)


def _of(names: tuple[str, ...]) -> str:
    return f"{len(names)} variable{'s' if len(names) > 1 else ''}"


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
        looked_up: how steps read those that they look rows up in, as far as steps were traced.

    Attributes:
        looked_up: as given.
    """

    def __init__(self, tasks: Sequence[TaskPlacement], looked_up: LookedUp | None = None) -> None:
        self._tasks = tuple(tasks)
        self.looked_up = looked_up or LookedUp()

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
        return "\n".join(filter(None, [text_table(rows), str(self.looked_up)]))


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


class _Held(NamedTuple):
    name: str
    num_bytes: int
    weight: int


class PlacementLedger:
    """The variables that live on each ps now, and the ps that takes the next one."""

    def __init__(self, num_ps: int) -> None:
        self._variables: list[dict[int, _Held]] = [{} for _ in range(num_ps)]
        # Of variables that steps look rows up in: whether they are small, name and bytes.
        self._looked_up: dict[int, tuple[bool, str, int]] = {}

    def lightest(self) -> int:
        """Return the index of the ps with the fewest bytes; of several, the lowest."""
        return min(range(len(self._variables)), key=self._weight_and_index)

    def heaviest(self) -> int:
        """Return the index of the ps with the most bytes; of several, the lowest."""
        return max(range(len(self._variables)), key=lambda ps: (self._weight(ps), -ps))

    def spread(self, num_shards: int) -> list[int]:
        """Return the ps of each of `num_shards` shards of one variable, the lightest first.

        They are as many different ps as there are.
        """
        by_bytes = sorted(range(len(self._variables)), key=self._weight_and_index)
        return [by_bytes[shard % len(by_bytes)] for shard in range(num_shards)]

    def add(self, variable: tf.Variable, *, weighs: bool = True) -> None:
        """Count `variable` until it is collected; one that is on no ps is not counted.

        Where it does not weigh, the next variable goes where it would go without it.
        """
        spec = tf.DeviceSpec.from_string(variable.device)
        if spec.job != "ps":
            return
        held = self._variables[spec.task]
        # Not the variable itself, which would never be collected.
        num_bytes = math.prod(variable.shape) * variable.dtype.size
        held[id(variable)] = _Held(variable.name, num_bytes, num_bytes if weighs else 0)
        weakref.finalize(variable, held.pop, id(variable), None)

    def note_looked_up(self, variables: Iterable[Any], *, small: bool) -> None:
        """Note that steps look rows up in Keras variables, and whether they are whole for that."""
        for variable in variables:
            num_bytes = math.prod(variable.shape) * variable.storage.dtype.size
            if id(variable) not in self._looked_up:
                weakref.finalize(variable, self._looked_up.pop, id(variable), None)
            self._looked_up[id(variable)] = (small, variable.path, num_bytes)

    def placement(self) -> Placement:
        """Return the account as it is now."""
        return Placement(
            [
                TaskPlacement(
                    ps_device(ps),
                    len(held),
                    sum(own.num_bytes for own in held),
                    tuple(own.name for own in held),
                )
                for ps, held in enumerate(map(self._held_by, range(len(self._variables))))
            ],
            self._all_looked_up(),
        )

    def _all_looked_up(self) -> LookedUp:
        known = list(self._looked_up.values())
        tables, small = ([entry for entry in known if entry[0] is kind] for kind in (False, True))
        return LookedUp(
            tuple(name for _, name, _ in tables),
            tuple(name for _, name, _ in small),
            sum(num_bytes for *_, num_bytes in tables),
            sum(num_bytes for *_, num_bytes in small),
        )

    def _held_by(self, ps: int) -> list[_Held]:
        # A copy: Python may collect a variable, and take it off, in the middle of a loop.
        return list(self._variables[ps].values())

    def _weight(self, ps: int) -> int:
        """Return the bytes of what weighs on a ps."""
        return sum(held.weight for held in self._held_by(ps))

    def _weight_and_index(self, ps: int) -> tuple[int, int]:
        return self._weight(ps), ps
