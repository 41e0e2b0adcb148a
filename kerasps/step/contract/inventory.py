"""The variables that a step touches, by how it reads and writes them.

Only a trace shows which variables a step reads whole or by rows, and which it assigns inside a
`tf.cond` or `tf.while_loop`, from which a plain tensor cannot get out. So a trace adds what it met
to the inventory; if that was new, the step is traced again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from kerasps.errors import UnsupportedError
from kerasps.step.records.identity import ByIdentity, IdentitySet
from kerasps.variables import ParameterServerVariable, is_seed_state
from kerasps.variables.storage.kinds import TABLE_NAME, is_metric_state

# A table that is read whole costs its size in each step; below this nobody would notice.
_WARN_BYTES = 2**24

# From this size on it pays to ask for the rows of a variable, see `benchmarks/small_tables.py`.
DEFAULT_TABLE_MIN_BYTES = 32 << 10

_READ_AGAIN = "the step reads it again after an update of it"


@dataclass(frozen=True)
class ScratchKey:
    """The key of a scratch resource, which holds a variable's value or a tensor of an update."""

    # "value": the variable's value in the step; the name of a field of a `Change`: that field of
    # the step's change to it; "update": a tensor of an update.
    kind: str
    owner: int  # the `id` of the variable, or the number of the update
    index: int = 0  # which tensor of the update, or which stage of the step (see `StepValues`)


class Inventory:
    """The variables that the traces of a step have met; each trace can only add to it.

    Args:
        table_min_bytes: variables of fewer bytes are never tables: pulling one whole, with the
            other small variables, costs less than asking for its rows.
    """

    def __init__(self, table_min_bytes: int = 0) -> None:
        self._table_min_bytes = table_min_bytes
        self.optimizers: IdentitySet[Any] = IdentitySet()  # those that the step applies
        # The optimizers' variables except the iterations; a step replaces their values.
        self.optimizer_state: IdentitySet[ParameterServerVariable] = IdentitySet()
        # Variables that the step reads again after their update.
        self.ahead: IdentitySet[ParameterServerVariable] = IdentitySet()
        # Variables that are read whole.
        self.pulled: IdentitySet[ParameterServerVariable] = IdentitySet()
        self.metrics: IdentitySet[ParameterServerVariable] = IdentitySet()  # the states of metrics
        # The states of seed generators.
        self.seeds: IdentitySet[ParameterServerVariable] = IdentitySet()
        # Variables that are read by rows only, and the number of their look-ups.
        self.tables: ByIdentity[ParameterServerVariable, int] = ByIdentity()
        # Variables that would be tables, but are read whole because they are small.
        self.small: IdentitySet[ParameterServerVariable] = IdentitySet()
        # Variables whose values a step replaces, although it seems to add to them.
        self.replaced: IdentitySet[ParameterServerVariable] = IdentitySet()
        # The worker's resources for a step, and the specs of their values.
        self.scratch: dict[ScratchKey, tf.TensorSpec] = {}
        # How updates couple rows, by the ids of optimizer and variable; None if not.
        self.couplings: dict[tuple[int, int], str | None] = {}
        # True if a trace added a variable or value since this was last set to False.
        self.grew = False
        self.presumes = True  # True until a trace has settled what was presumed
        self._used_whole: IdentitySet[ParameterServerVariable] = IdentitySet()
        self._unused: IdentitySet[ParameterServerVariable] = IdentitySet()
        self._warned: IdentitySet[ParameterServerVariable] = IdentitySet()

    def add_optimizers(self, optimizers: Iterable[keras.optimizers.Optimizer]) -> None:
        """Replace the optimizers of the step by these."""
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
            if not variable.has_whole_value:
                raise no_whole_value(variable, "the step asks for all of it")
            kind.add(variable)
            self.tables.pop(variable, None)
            self.grew = True

    def presume(
        self, variables: Iterable[ParameterServerVariable], known: Inventory | None
    ) -> None:
        """Add the variables that the step probably reads, to save traces; the first one settles it.

        Args:
            known: the inventory of another step of the same model, which mostly reads the same
                variables in the same way; None for none.
        """
        for variable in variables:
            if not variable.has_whole_value and variable.name != TABLE_NAME:
                continue  # what a ps keeps beside a table, which no step reads
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
        """Note a variable whose value the step asks for, even if it does not use the value."""
        if variable not in self._unused:
            self.add(variable)

    def add_table(self, variable: ParameterServerVariable, num_lookups: int) -> None:
        """Note a variable that the step reads by rows, and the number of its look-ups."""
        if variable.has_whole_value and _num_bytes(variable) < self._table_min_bytes:
            self.small.add(variable)
            self.add(variable)
        elif self.tables.get(variable) != num_lookups:
            self.pulled.discard(variable)
            self.tables[variable] = num_lookups
            self.grew = True

    def may_be_table(self, variable: ParameterServerVariable) -> bool:
        """Return False if the step is known to need more than rows of `variable`."""
        return (
            variable not in self._used_whole
            and bool(variable.storage.shape.rank)
            and _num_bytes(variable) >= self._table_min_bytes
            and not is_metric_state(variable)
            and not is_seed_state(variable)
        )

    def use_whole(self, variable: ParameterServerVariable) -> None:
        """Note that the step uses the value of `variable` for more than look-ups of rows."""
        self._used_whole.add(variable)

    def read_whole(self, table: ParameterServerVariable, reason: str) -> None:
        """Note that the step must read a table whole; warn with the reason if it is large."""
        if not table.has_whole_value:
            raise no_whole_value(table, reason)
        num_bytes = _num_bytes(table)
        if num_bytes > _WARN_BYTES and table not in self._warned:
            self._warned.add(table)
            warnings.warn(
                f"All {num_bytes:,} bytes of '{table.path}' are read in each step, not only the "
                f"rows that are looked up, because {reason}. This is exact but slow.",
                stacklevel=2,
            )
        self.add(table)

    def meet(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Note that the step applies `optimizer`, which may be no attribute of the model."""
        if optimizer not in self.optimizers:
            self.optimizers.add(optimizer)
            self.grew = True

    def look_ahead(self, variable: ParameterServerVariable) -> None:
        """Note a variable that the step reads again after an update of it.

        The worker then computes the update too.
        """
        if variable not in self.ahead:
            self.ahead.add(variable)
            self.read_whole(variable, _READ_AGAIN)
            self.grew = True

    def add_replaced(self, variable: ParameterServerVariable) -> None:
        """Note a variable whose value the step replaces, although it seems to add to it."""
        if variable not in self.replaced:
            self.replaced.add(variable)
            self.grew = True

    def settle_reads(
        self,
        whole: Mapping[ParameterServerVariable, str],
        lookups: Mapping[ParameterServerVariable, Sequence[object]],
    ) -> None:
        """Replace what the first trace presumed by what it saw; do nothing after later traces."""
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
        """Note a value that the step assigns inside control flow, so that it needs a resource."""
        if key not in self.scratch:
            self.scratch[key] = spec
            self.grew = True


def _is_read_by_rows(variable: ParameterServerVariable) -> bool:
    """Return True if the first trace presumes that the step reads `variable` by rows."""
    # TensorFlow has no gradient of a look-up in a table with more rows than that.
    return variable.name == TABLE_NAME or bool(variable.storage.shape[0] > tf.int32.max)


def no_whole_value(table: ParameterServerVariable, reason: str) -> UnsupportedError:
    """Return the error of a step that needs all rows of a table without a vocabulary."""
    return UnsupportedError(
        f"A step needs all rows of '{table.path}', a table without a vocabulary, because {reason}. "
        "Expected: look-ups by the layer `DynamicEmbedding`, outside of loops and conditions. "
        "Received: another use. Use `keras.layers.Embedding`, whose ids are the numbers of rows."
    )


def _num_bytes(variable: ParameterServerVariable) -> int:
    return int(variable.storage.shape.num_elements() * variable.storage.dtype.size)
