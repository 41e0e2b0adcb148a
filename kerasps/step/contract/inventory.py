"""The variables that a step touches, by how they reach it.

Which variables a step reads, which of them by rows only, and which it assigns inside a `tf.cond` or
`tf.while_loop` (where a plain tensor cannot get out), is known only when it has been traced. So a
trace notes here what it met and, if that was new, is done again.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.step.updates.coupled import CoupledUpdate
from kerasps.variables import ParameterServerVariable, is_seed_state
from kerasps.variables.kinds import TABLE_NAME, is_metric_state

# A table that is read whole all the same costs its size in each step; below this nobody would
# notice.
_WARN_BYTES = 2**24

# From here on it pays to ask for the rows of a variable, see `benchmarks/small_tables.py`.
DEFAULT_TABLE_MIN_BYTES = 32 << 10

_READ_AGAIN = "the step reads it again after an update of it"


@dataclass(frozen=True)
class ScratchKey:
    """The key of a scratch resource, which holds a variable's value or a tensor of an update.

    Attributes:
        kind: "value" of a variable as the step has it; "base", that value without what the step
            itself has added since the last update; "pending", what it had added before that update;
            or a tensor of an "update".
        owner: the `id` of the variable, or the number of the update.
        index: which tensor of the update.
    """

    kind: str
    owner: int
    index: int = 0


class Inventory:
    """The variables that the traces of a step have met so far; each can only add to it.

    Args:
        table_min_bytes: variables of fewer bytes are never tables: to bring one whole, with all
            else that is small, costs less than to ask for its rows.

    Attributes:
        optimizers: those that the step applies.
        optimizer_state: their variables but the iterations: pushed in a way of its own (see
            `StepValues.state_changes`).
        ahead: variables that the step reads again after their update.
        pulled: variables that are read whole.
        metrics: the states of metrics.
        seeds: the states of seed generators.
        tables: variables that are read by rows only, and in how many look-ups.
        small: variables that would be tables, and are read whole for being small.
        scratch: the resources that the worker has for a step, and the specs of their values.
        coupled: the updates that were traced, by all that they depend on.
        grew: whether anything was added since this was last set to False.
        presumes: whether no trace has settled yet what was presumed.
    """

    def __init__(self, table_min_bytes: int = 0) -> None:
        self._table_min_bytes = table_min_bytes
        self.optimizers: IdentitySet[Any] = IdentitySet()
        self.optimizer_state: IdentitySet[ParameterServerVariable] = IdentitySet()
        self.ahead: IdentitySet[ParameterServerVariable] = IdentitySet()
        self.pulled: IdentitySet[ParameterServerVariable] = IdentitySet()
        self.metrics: IdentitySet[ParameterServerVariable] = IdentitySet()
        self.seeds: IdentitySet[ParameterServerVariable] = IdentitySet()
        self.tables: ByIdentity[ParameterServerVariable, int] = ByIdentity()
        self.small: IdentitySet[ParameterServerVariable] = IdentitySet()
        self.scratch: dict[ScratchKey, tf.TensorSpec] = {}
        self.coupled: dict[Hashable, CoupledUpdate] = {}
        self.grew = False
        self.presumes = True
        self._used_whole: IdentitySet[ParameterServerVariable] = IdentitySet()
        self._unused: IdentitySet[ParameterServerVariable] = IdentitySet()
        self._warned: IdentitySet[ParameterServerVariable] = IdentitySet()

    def add_optimizers(self, optimizers: Iterable[keras.optimizers.Optimizer]) -> None:
        """Note the optimizers of the step, in place of those before."""
        self.optimizers = IdentitySet(optimizers)
        self.optimizer_state = IdentitySet(
            v for optimizer in self.optimizers for v in optimizer.variables if v.name != "iteration"
        )

    def add(self, variable: ParameterServerVariable) -> None:
        """Note a variable that the step reads."""
        if is_metric_state(variable):
            kind = self.metrics
        elif is_seed_state(variable):
            kind = self.seeds
        else:
            kind = self.pulled
        if variable not in kind:
            kind.add(variable)
            self.tables.pop(variable, None)
            self.grew = True

    def presume(
        self, variables: Iterable[ParameterServerVariable], known: Inventory | None
    ) -> None:
        """Note what the step probably reads, to save traces; the first one settles it.

        Args:
            variables: the variables.
            known: the inventory of another step of the same model, which mostly reads what it
                reads in the same way; None for none.
        """
        for variable in variables:
            if known is None:
                if self.may_be_table(variable) and _is_read_by_rows(variable):
                    self.add_table(variable, 1)
                else:
                    self.add(variable)
            elif variable in known.tables:
                self.add_table(variable, known.tables[variable])
            elif variable in known._unused:
                self._unused.add(variable)
            else:
                self.add(variable)

    def add_value(self, variable: ParameterServerVariable) -> None:
        """Note a variable whose value the step asks for, if only to do nothing with it."""
        if variable not in self._unused:
            self.add(variable)

    def add_table(self, variable: ParameterServerVariable, num_lookups: int) -> None:
        """Note a variable that the step reads by rows, and how often."""
        if _num_bytes(variable) < self._table_min_bytes:
            self.small.add(variable)
            self.add(variable)
        elif self.tables.get(variable) != num_lookups:
            self.pulled.discard(variable)
            self.tables[variable] = num_lookups
            self.grew = True

    def may_be_table(self, variable: ParameterServerVariable) -> bool:
        """Return whether rows may be all that the step wants of a variable, as far as is known."""
        return (
            variable not in self._used_whole
            and bool(variable.storage.shape.rank)
            and _num_bytes(variable) >= self._table_min_bytes
            and not is_metric_state(variable)
            and not is_seed_state(variable)
        )

    def use_whole(self, variable: ParameterServerVariable) -> None:
        """Note that the step uses the value of a variable otherwise than to look rows up in it."""
        self._used_whole.add(variable)

    def read_whole(self, table: ParameterServerVariable, reason: str) -> None:
        """Note that a table must be read whole, and warn where that is a lot, saying why."""
        num_bytes = _num_bytes(table)
        if num_bytes > _WARN_BYTES and table not in self._warned:
            self._warned.add(table)
            warnings.warn(
                f"All {num_bytes:,} bytes of '{table.path}' are read in each step, not only the "
                f"rows that are looked up, because {reason}. This is exact, and slow.",
                stacklevel=2,
            )
        self.add(table)

    def meet(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Note that the step applies `optimizer`, which the model may not lead to."""
        if optimizer not in self.optimizers:
            self.optimizers.add(optimizer)
            self.grew = True

    def look_ahead(self, variable: ParameterServerVariable) -> None:
        """Note a variable that the step reads again after an update of it.

        The worker then works the update out too.
        """
        if variable not in self.ahead:
            self.ahead.add(variable)
            self.read_whole(variable, _READ_AGAIN)
            self.grew = True

    def settle(
        self,
        whole: Mapping[ParameterServerVariable, str],
        lookups: Mapping[ParameterServerVariable, Sequence[object]],
    ) -> None:
        """Replace what the first trace presumed by what it saw. Does nothing after later ones.

        Args:
            whole: the variables that the trace read whole, and why.
            lookups: its look-ups, by the table.
        """
        if not self.presumes:
            return
        self.presumes = False
        for table, presumed in list(self.tables.items()):
            number = len(lookups.get(table, []))
            if number == 0:
                del self.tables[table]
                self._unused.add(table)
                self.grew = True
            elif number < presumed:
                self.tables[table] = number
                self.grew = True
        for variable in self.pulled:
            if variable in whole:
                if variable in lookups:
                    self.read_whole(variable, whole[variable])
            elif variable in lookups:
                self.add_table(variable, len(lookups[variable]))
            else:
                self.pulled.discard(variable)
                self._unused.add(variable)
                self.grew = True

    def add_scratch(self, key: ScratchKey, spec: tf.TensorSpec) -> None:
        """Note a value that is assigned inside control flow, and so needs a resource of its own."""
        if key not in self.scratch:
            self.scratch[key] = spec
            self.grew = True


def _is_read_by_rows(variable: ParameterServerVariable) -> bool:
    """Return whether the first trace presumes that a variable of some rank is read by rows."""
    # TensorFlow has no gradient of a look-up in more rows than that.
    return variable.name == TABLE_NAME or bool(variable.storage.shape[0] > tf.int32.max)


def _num_bytes(variable: ParameterServerVariable) -> int:
    return int(variable.storage.shape.num_elements() * variable.storage.dtype.size)
