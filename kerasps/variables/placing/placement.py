"""Chooses the ps of each new variable, and reports which ps holds which variables."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from kerasps.runtime.devices import ps_device
from kerasps.words import Records, text_table

# A variable, or a shard of one, of up to so many bytes is small: reading or updating it takes less
# time than starting the operation.
SMALL_BYTES = 2**18
# Small variables of up to so many bytes together go to one ps, one after the other. Sending them in
# a step takes about as long as the messages to one more ps.
RUN_BYTES = 2**20


@dataclass(frozen=True)
class LookedUp:
    """The variables that steps use by rows only: tables, and small ones that are fetched whole.

    Args:
        tables: the names of those of which steps fetch rows.
        small: the names of those that steps fetch whole, because they are small.
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
        num_bytes: the bytes of all of them.
        names: their names, in no order.
    """

    device: str
    num_variables: int
    num_bytes: int
    names: tuple[str, ...]


class Placement(Records[TaskPlacement]):
    """The variables of every ps task, a `TaskPlacement` each, in task order; prints as a table.

    ```python
    print(strategy.placement())
    largest = max(task.num_bytes for task in strategy.placement())
    ```

    Args:
        tasks: the variables of each ps.
        looked_up: the variables that steps use by rows, as far as steps were traced.

    Attributes:
        looked_up: as given.
    """

    def __init__(self, tasks: Sequence[TaskPlacement], looked_up: LookedUp | None = None) -> None:
        super().__init__(tasks)
        self.looked_up = looked_up or LookedUp()

    @property
    def num_bytes(self) -> int:
        """The bytes of all variables on all ps tasks."""
        return sum(task.num_bytes for task in self)

    def __repr__(self) -> str:
        num_variables = sum(task.num_variables for task in self)
        return (
            f"<Placement of {num_variables} variables, {self.num_bytes:,} bytes on {len(self)} ps>"
        )

    def __str__(self) -> str:
        rows = [("ps", "variables", "bytes", "share", "device")]
        for index, task in enumerate(self):
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


@dataclass(frozen=True)
class Held:
    """A variable, or a shard of one, that a ps holds."""

    name: str  # its name in messages
    ps: int  # the index of the ps
    num_bytes: int  # its size
    # Whether the ledger chose the ps. It does not for a slot, which goes beside its variable.
    is_placed: bool


class PlacementLedger:
    """Records the variables on each ps, and chooses the ps of each new one.

    A new variable goes to the ps with the fewest bytes. A small one goes to the ps of the variable
    that was placed before it, until 1 MiB of small ones follow each other there: a step sends a
    message to each ps that it needs, and a small message costs as much as an empty one. The choice
    for a large variable ignores the small ones right before it, so it may go to the same ps.
    """

    def __init__(self, num_ps: int) -> None:
        self._num_ps = num_ps
        # By the `id` of the variable, in the order in which they were made.
        self._held: dict[int, Held] = {}
        # For variables that steps use by rows: whether they are small, name and bytes.
        self._looked_up: dict[int, tuple[bool, str, int]] = {}
        # Those that have no number of rows.
        self._growing: dict[int, weakref.ref[Any]] = {}

    def place(self, num_bytes: int) -> int:
        """Return the index of the ps that a new variable of `num_bytes` bytes goes to."""
        ps, run_bytes = self._last_run()
        if num_bytes <= SMALL_BYTES:
            if ps is not None and run_bytes + num_bytes <= RUN_BYTES:
                return ps
            run_bytes = 0
        weights = self._weights()
        if ps is not None:
            weights[ps] -= run_bytes
        return weights.index(min(weights))

    def spread(self, num_shards: int) -> list[int]:
        """Return the ps of each of `num_shards` shards of a variable, the emptiest ps first.

        Each ps gets one shard before any gets a second.
        """
        weights = self._weights()
        by_bytes = sorted(range(self._num_ps), key=weights.__getitem__)
        return [by_bytes[shard % self._num_ps] for shard in range(num_shards)]

    def add(self, variable: tf.Variable, *, is_placed: bool) -> None:
        """Count a variable, if it is on a ps, until Python collects it."""
        spec = tf.DeviceSpec.from_string(variable.device)
        if spec.job == "ps":
            num_bytes = math.prod(variable.shape) * variable.dtype.size
            held = Held(variable.name, spec.task, num_bytes, is_placed)
            self._note(variable, held)

    def _note(self, variable: tf.Variable, held: Held) -> None:
        # No reference to the variable, else Python would never collect it.
        self._held[id(variable)] = held
        weakref.finalize(variable, self._held.pop, id(variable), None)

    def _for_choice(self) -> list[Held]:
        """Return the variables that affect the next choice, in the order of creation."""
        return list(self._held.values())  # a copy: Python may collect one during a loop

    def _weights(self) -> list[int]:
        """Return the bytes on each ps."""
        weights = [0] * self._num_ps
        for held in self._for_choice():
            weights[held.ps] += held.num_bytes
        return weights

    def _last_run(self) -> tuple[int | None, int]:
        """Return the ps that the last variable was placed on, and the bytes of its run.

        The run is the small variables that were placed there in a row since the last large one.
        """
        ps, run_bytes = None, 0
        for held in reversed(self._for_choice()):
            if held.is_placed:
                if ps not in (None, held.ps):
                    break
                ps = held.ps
                if held.num_bytes > SMALL_BYTES:
                    break
                run_bytes += held.num_bytes
        return ps, run_bytes

    def note_looked_up(self, variables: Iterable[Any], *, small: bool) -> None:
        """Record that steps use Keras variables by rows, and whether they fetch them whole."""
        for variable in variables:
            if not variable.has_whole_value:
                self._note_growing(variable)
                continue
            num_bytes = math.prod(variable.shape) * variable.storage.dtype.size
            if id(variable) not in self._looked_up:
                weakref.finalize(variable, self._looked_up.pop, id(variable), None)
            self._looked_up[id(variable)] = (small, variable.path, num_bytes)

    def _note_growing(self, variable: Any) -> None:
        if id(variable) not in self._growing:
            self._growing[id(variable)] = weakref.ref(variable)
            weakref.finalize(variable, self._growing.pop, id(variable), None)

    def placement(self) -> Placement:
        """Return the current placement; of tables without a vocabulary, that of the last count."""
        all_held: list[list[Held]] = [[] for _ in range(self._num_ps)]
        growing = [part for table in self._all_growing() for part in table]
        for held in [*self._held.values(), *growing]:
            all_held[held.ps].append(held)
        return Placement(
            [
                TaskPlacement(
                    ps_device(ps),
                    len(on_ps),
                    sum(held.num_bytes for held in on_ps),
                    tuple(held.name for held in on_ps),
                )
                for ps, on_ps in enumerate(all_held)
            ],
            self._all_looked_up(),
        )

    def _all_growing(self) -> list[list[Held]]:
        """Return what each ps holds of each table without a vocabulary, and of its slots."""
        tables = [table for ref in list(self._growing.values()) if (table := ref()) is not None]
        return [
            [Held(table.path, ps, size, False) for ps, size in enumerate(table.bytes_by_ps())]
            for table in tables
        ]

    def _all_looked_up(self) -> LookedUp:
        known = list(self._looked_up.values())
        known += [
            (False, table[0].name, sum(part.num_bytes for part in table))
            for table in self._all_growing()
        ]
        tables, small = ([entry for entry in known if entry[0] is kind] for kind in (False, True))
        return LookedUp(
            tuple(name for _, name, _ in tables),
            tuple(name for _, name, _ in small),
            sum(num_bytes for *_, num_bytes in tables),
            sum(num_bytes for *_, num_bytes in small),
        )
