"""The compute phase: an unmodified `train_step` as a pure function of a batch and of the values pulled for it.

While `train_step` is traced, a `ParameterServerVariable` resolves to the tensor that was pulled for it, an assignment becomes
a value of the step, and `optimizer.apply` is recorded instead of carried out. What comes out are tensors: gradients and new
values, for the push phase to bring to the ps tasks. Nothing in here touches a remote resource.

Which variables a step reads, which of them by rows only, and which it assigns inside a `tf.cond` or `tf.while_loop` (where a
plain tensor cannot get out), is known only when it has been traced. So a trace notes what it met and, if that was news, is done
again.

A variable that is read by rows only, through `take`, is a table: in a step it is the tensor of the rows that the step asked
for, each once, and a gradient with respect to it has a row for each of these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from kerasps import variables
from kerasps.coupled import CoupledUpdate
from kerasps.errors import UnsupportedError
from kerasps.optimizers import check_optimizer, is_known_to_treat_rows_alone, shared_state
from kerasps.traced_update import trace_update
from kerasps.updating import UpdatePhase, ValueOf, finish
from kerasps.variables import ParameterServerVariable

# How often a trace may meet news before it is given up; each round can only add to the inventory, two are usual.
MAX_TRACES = 8

# Seeds to keep between two steps for a generator that draws inside a loop, where the number of draws is unknown.
SEEDS_PER_STEP_OF_A_LOOP = 2**20

# A table that is read whole all the same costs its size in each step; below this nobody would notice.
_WARN_BYTES = 2**24

_READ_AGAIN = "the step reads it again after an update of it"

_IN_ANOTHER_WAY = "the step does not only look rows up, or does so inside a loop or a condition"

# Regularizers that are a sum over elements, of which a table's rows have theirs.
_SUMS_OVER_ELEMENTS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class Inventory:
    """The variables that a step touches, by how they reach it."""

    def __init__(self) -> None:
        self.optimizers: dict[int, Any] = {}
        self.optimizer_state: set[int] = set()
        self.ahead: set[int] = set()
        self.pulled: dict[int, ParameterServerVariable] = {}
        self.metrics: dict[int, ParameterServerVariable] = {}
        self.seeds: dict[int, ParameterServerVariable] = {}
        self.scratch: dict[Hashable, tf.TensorSpec] = {}
        self.tables: dict[int, ParameterServerVariable] = {}
        self.num_lookups: dict[int, int] = {}
        self.coupled: dict[Hashable, CoupledUpdate] = {}
        self.grew = False
        self._presumes = True
        self._warned: set[int] = set()

    def add_optimizers(self, optimizers: Sequence[Any]) -> None:
        """Notes the optimizers of the step: their state is pushed in its own way (see `Compute.state_changes`)."""
        self.optimizers = {id(optimizer): optimizer for optimizer in optimizers}
        self.optimizer_state = {id(v) for optimizer in optimizers for v in optimizer.variables if v.name != "iteration"}

    def add(self, variable: ParameterServerVariable) -> None:
        """Notes a variable that the step reads."""
        if variables.is_metric_state(variable):
            kind = self.metrics
        elif variables.is_seed_state(variable):
            kind = self.seeds
        else:
            kind = self.pulled
        if id(variable) not in kind:
            kind[id(variable)] = variable
            self.tables.pop(id(variable), None)
            self.grew = True

    def add_table(self, variable: ParameterServerVariable, num_lookups: int) -> None:
        """Notes a variable that the step reads by rows, and how often."""
        if self.num_lookups.get(id(variable)) != num_lookups or id(variable) not in self.tables:
            self.pulled.pop(id(variable), None)
            self.tables[id(variable)] = variable
            self.num_lookups[id(variable)] = num_lookups
            self.grew = True

    def read_whole(self, table: ParameterServerVariable, reason: str) -> None:
        """Notes that a table must be read whole, and says why where that is a lot."""
        num_bytes = table.storage.shape.num_elements() * table.storage.dtype.size
        if num_bytes > _WARN_BYTES and id(table) not in self._warned:
            self._warned.add(id(table))
            warnings.warn(
                f"All {num_bytes:,} bytes of '{table.path}' are read in each step, not only the rows that are looked up, "
                f"because {reason}. This is exact, and slow.",
                stacklevel=2,
            )
        self.add(table)

    def meet(self, optimizer: Any) -> None:
        """Notes that the step applies `optimizer`, which may be none that can be reached from the model."""
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = optimizer
            self.grew = True

    def look_ahead(self, variable: ParameterServerVariable) -> None:
        """Notes a variable that the step looks at again after an update: the worker then works the update out too."""
        if id(variable) not in self.ahead:
            self.ahead.add(id(variable))
            self.read_whole(variable, _READ_AGAIN)
            self.grew = True

    def settle(self, phase: Compute) -> None:
        """Replaces what was presumed before the first trace, that every variable is read whole, by what that trace saw."""
        if not self._presumes:
            return
        self._presumes = False
        for key, variable in list(self.pulled.items()):
            if key in phase.read_whole:
                if key in phase.looked_up:
                    self.read_whole(variable, phase.read_whole[key])
            elif key in phase.looked_up:
                self.add_table(variable, len(phase.lookups[key]))
            else:
                del self.pulled[key]
                self.grew = True

    def add_scratch(self, key: Hashable, spec: tf.TensorSpec) -> None:
        """Notes a value that is assigned inside control flow and therefore needs a resource of its own."""
        if key not in self.scratch:
            self.scratch[key] = spec
            self.grew = True

    def start_values(self) -> list[ParameterServerVariable]:
        """All variables whose value a step starts from, in the order of the compute function's arguments."""
        return [*self.pulled.values(), *self.metrics.values(), *self.seeds.values()]


@dataclass
class Update:
    """One `optimizer.apply`: what the push needs to carry it out on the ps tasks.

    `tensors` are scalars (learning rate, shared optimizer state such as the iterations, the scale of clipping), a gradient per
    variable, and what is sent of the whole of those that are `coupled` (by their `id`), in that order.
    """

    optimizer: Any
    variables: list[ParameterServerVariable]
    shared: list[ParameterServerVariable]
    tensors: list[tf.Tensor] = field(default_factory=list)
    applied: tf.Tensor | None = None
    has_clip_scale: bool = False
    coupled: dict[int, CoupledUpdate] = field(default_factory=dict)
    num_sent: dict[int, int] = field(default_factory=dict)

    @property
    def num_scalars(self) -> int:
        return 1 + len(self.shared) + self.has_clip_scale

    def of(self, tensors: Sequence[tf.Tensor]) -> UpdateTensors:
        """What `tensors`, laid out as its own are, say."""
        remaining = iter(tensors)
        scalars = [next(remaining) for _ in range(self.num_scalars)]
        gradients = {id(variable): next(remaining) for variable in self.variables}
        sent = {key: [next(remaining) for _ in range(count)] for key, count in self.num_sent.items()}
        return UpdateTensors(scalars, gradients, sent)


@dataclass(frozen=True)
class UpdateTensors:
    """The tensors of an `Update`: `gradients` by the `id` of their variables, as what is `sent` of the whole of some."""

    scalars: list[tf.Tensor]
    gradients: dict[int, tf.Tensor]
    sent: dict[int, list[tf.Tensor]]


def spec_of(variable: ParameterServerVariable) -> tf.TensorSpec:
    """The `tf.TensorSpec` of a variable's storage."""
    return tf.TensorSpec(variable.storage.shape, variable.storage.dtype)


@dataclass
class TableRows:
    """What a table is in one step: the rows that the step asks for, and the places in it of the ids of each look-up.

    `rows` has shape `[num_rows_asked_for] + table.shape[1:]`, each of `positions` is a flat int32 tensor.
    """

    rows: tf.Tensor
    positions: list[tf.Tensor]


@dataclass
class InputNames:
    """The names of the inputs of the compute phase's graph: the batch, the start values, and those of each table."""

    data: list[str]
    values: list[str]
    tables: dict[int, list[str]]


class _Ahead(UpdatePhase):
    """The phase in which a worker does for itself what the ps will do: the update of a variable that the step reads again.

    The ps are pushed the gradient as ever. What changes here are tensors of the step: of the variable, and of its slots.
    """

    def __init__(self, compute: Compute, update: Update, learning_rate: tf.Tensor, shared: Sequence[tf.Tensor]) -> None:
        super().__init__(update.optimizer, learning_rate, {id(v): t for v, t in zip(update.shared, shared, strict=True)})
        self._compute = compute

    def current(self, variable: ParameterServerVariable) -> tf.Tensor:
        """The value of `variable` as it stands in the step."""
        return self._compute.read(variable)

    def held(self, variable: ParameterServerVariable) -> ValueOf:
        return ValueOf(self, variable)

    def assign_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self._compute.set_ahead(variable, value)

    def add_to_held(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self._compute.set_ahead(variable, self.current(variable) + value)


class Compute:
    """The phase in which variables are the tensors of one step (see `variables.Phase`)."""

    hides_constraints = True

    def __init__(
        self,
        inventory: Inventory,
        data: Any,
        values: Sequence[tf.Tensor],
        tables: Sequence[TableRows],
        scratch: Sequence[tf.Tensor],
    ) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._inventory = inventory
        self._initial: dict[Hashable, tf.Tensor] = {id(v): t for v, t in zip(inventory.start_values(), values, strict=True)}
        self._values = dict(self._initial)
        self._tables = dict(zip(inventory.tables, tables, strict=True))
        self._scratch = dict(zip(inventory.scratch, scratch, strict=True))
        self._scratch_reads: dict[Hashable, dict[Any, tf.Tensor]] = {}
        self._assigned: dict[int, ParameterServerVariable] = {}
        self._applying: tuple[Any, ...] | None = None
        # Variables that an update in this step changes, as far as the trace has come.
        self._updated: set[int] = set()
        self.inputs = InputNames(
            _names(leaves_of(data)),
            _names(values),
            {key: _names([table.rows, *table.positions]) for key, table in self._tables.items()},
        )
        self.read_whole: dict[int, str] = {}
        self.looked_up: dict[int, ParameterServerVariable] = {}
        self.lookups: dict[int, list[tf.Tensor]] = {}
        self.draws: dict[int, int] = {}
        self.updates: list[Update] = []

    # Variables

    def read(self, variable: ParameterServerVariable) -> tf.Tensor:
        key = id(variable)
        self.read_whole.setdefault(key, _IN_ANOTHER_WAY)
        self._look_ahead(variable)
        if key in self._tables:
            self._inventory.read_whole(variable, _IN_ANOTHER_WAY)
            return tf.zeros(variable.storage.shape, variable.storage.dtype)
        if key not in self._values and key not in self._scratch:
            self._inventory.add(variable)
            return tf.zeros(variable.storage.shape, variable.storage.dtype)
        return self._current(key)

    def shape(self, variable: ParameterServerVariable) -> tf.TensorShape:
        return variable.storage.shape

    def source(self, variable: ParameterServerVariable) -> tf.Tensor:
        key = id(variable)
        if key in self._tables:
            return self._tables[key].rows
        if key in self._values or key in self._scratch:
            return self._current(key)
        return tf.zeros(variable.storage.shape, variable.storage.dtype)

    def take(self, variable: ParameterServerVariable, ids: tf.Tensor) -> tf.Tensor:
        key = id(variable)
        number = len(self.lookups.setdefault(key, []))
        self.lookups[key].append(ids)
        self.looked_up[key] = variable
        self._look_ahead(variable)
        if key not in self._tables and (key in self._values or key in self._scratch):
            if self._in_control_flow():
                self.read_whole.setdefault(key, _IN_ANOTHER_WAY)
            return tf.gather(self._current(key), ids)
        row_shape = variable.storage.shape[1:]
        if self._in_control_flow():
            self._inventory.read_whole(variable, _IN_ANOTHER_WAY)
        elif key not in self._tables or number >= len(self._tables[key].positions):
            self._inventory.add_table(variable, number + 1)
        else:
            table = self._tables[key]
            rows = tf.reshape(tf.gather(table.rows, table.positions[number]), tf.concat([tf.shape(ids), row_shape], 0))
            rows.set_shape(ids.shape.concatenate(row_shape))
            return rows
        return tf.zeros(tf.concat([tf.shape(ids), row_shape], 0), variable.storage.dtype)

    def regularizer(self, variable: ParameterServerVariable, regularizer: Any) -> Any:
        key = id(variable)
        if type(regularizer) in _SUMS_OVER_ELEMENTS and (key in self._tables or key in self._values):
            self._look_ahead(variable)
            return lambda _: regularizer(self.source(variable))
        return regularizer

    def assign(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        key = id(variable)
        if not value.shape.is_compatible_with(variable.storage.shape):
            raise ValueError(
                f"A new value must have the variable's shape. Expected: {tuple(variable.shape)} for variable "
                f"'{variable.path}'. Received: {value.shape}."
            )
        if key not in self._values:
            self._inventory.add(variable)
        self.read_whole.setdefault(key, _IN_ANOTHER_WAY)
        self._look_ahead(variable)
        self._assigned[key] = variable
        self.draws[key] = self.draws.get(key, 0) + 1 if key not in self._scratch else SEEDS_PER_STEP_OF_A_LOOP
        self._set(key, spec_of(variable), value)

    def assign_add(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        self.assign(variable, self.read(variable) + value)

    def set_ahead(self, variable: ParameterServerVariable, value: tf.Tensor) -> None:
        """Takes the value that an update on the ps will give `variable`; it is not pushed."""
        key, spec = id(variable), spec_of(variable)
        if key in self._assigned:  # what the step itself has changed before is pushed all the same
            self._set(("pending", key), spec, self._difference(variable))
        value = tf.stop_gradient(value)  # an assignment, to a GradientTape
        self._set(key, spec, value)
        self._set(("base", key), spec, value)

    def _difference(self, variable: ParameterServerVariable) -> tf.Tensor:
        """What the step has added to `variable`, beside the updates of optimizers."""
        key = id(variable)
        if key not in self._initial:  # met in this trace, so there will be another
            return tf.zeros(variable.storage.shape, variable.storage.dtype)
        difference = self._current(key) - self._current(("base", key), self._initial[key])
        pending = ("pending", key)
        return difference + self._current(pending) if pending in self._values or pending in self._scratch else difference

    def _look_ahead(self, variable: ParameterServerVariable) -> None:
        if id(variable) in self._updated:
            self._inventory.look_ahead(variable)

    def _set(self, key: Hashable, spec: tf.TensorSpec, value: tf.Tensor) -> None:
        if key in self._scratch:
            tf.raw_ops.AssignVariableOp(resource=self._scratch[key], value=value)
            self._scratch_reads.pop(key, None)
        elif self._in_control_flow():
            self._inventory.add_scratch(key, spec)
        else:
            self._values[key] = value

    def _current(self, key: Hashable, default: tf.Tensor | None = None) -> tf.Tensor:
        return self._read_scratch(key) if key in self._scratch else self._values.get(key, default)

    def _read_scratch(self, key: Hashable) -> tf.Tensor:
        # As long as nothing is assigned, one tensor: a GradientTape knows a variable by it.
        graph = tf.compat.v1.get_default_graph()
        reads = self._scratch_reads.setdefault(key, {})
        if graph not in reads:
            spec = self._inventory.scratch[key]
            reads[graph] = tf.raw_ops.ReadVariableOp(resource=self._scratch[key], dtype=spec.dtype)
            reads[graph].set_shape(spec.shape)
        return reads[graph]

    def _in_control_flow(self) -> bool:
        return tf.compat.v1.get_default_graph() is not self._graph

    # Optimizers (called by the hooks)

    def meet(self, optimizer: Any) -> None:
        """Called before `optimizer` is applied."""
        self._inventory.meet(optimizer)

    def apply_gradients(self, optimizer: Any, gradients: Sequence[Any], trainable: Sequence[ParameterServerVariable]) -> None:
        """Stands in for `Optimizer._backend_apply_gradients`: clips, then records what the ps tasks need."""
        check_optimizer(optimizer, trainable)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        steps = optimizer.gradient_accumulation_steps
        clip_scale = None
        if not steps:
            gradients = optimizer._clip_gradients(gradients)
        elif optimizer.global_clipnorm:
            clip_scale = self._accumulated_clip_scale(optimizer, gradients, trainable)
        shared = shared_state(optimizer)
        before = [self.read(v) for v in shared]
        optimizer._backend_update_step(gradients, list(trainable), optimizer.learning_rate)
        if self._applying is None:
            raise UnsupportedError(
                f"Optimizer {optimizer.name!r} updates variables in `_backend_update_step` and not in `update_step`, which is "
                "what runs on the ps tasks. Expected: an optimizer whose `update_step` updates one variable. Received: "
                f"{type(optimizer).__name__}. Move the update into `update_step`, or call `super()._backend_update_step`."
            )
        gradients, trainable, learning_rate = self._applying
        self._applying = None
        after = [self.read(v) for v in shared]
        if steps:  # state that the optimizer moves with each update moves when the accumulated gradients are applied
            is_update = tf.equal((self.read(optimizer._iterations) + 1) % steps, 0)
            for variable, old, new in zip(shared, before, after, strict=True):
                if new is not old:
                    self.assign(variable, tf.where(is_update, new, old))
        update = Update(optimizer, list(trainable), shared, has_clip_scale=clip_scale is not None)
        scalars = [tf.cast(tf.convert_to_tensor(learning_rate), tf.float32), *after]
        if clip_scale is not None:
            scalars.append(clip_scale)
        gradients = [
            _shaped(tf.convert_to_tensor(g), self._gradient_shape(v)) for g, v in zip(gradients, trainable, strict=True)
        ]
        sent: list[tf.Tensor] = []
        for gradient, variable in zip(gradients, trainable, strict=True):
            sent += self._couple(update, variable, gradient, scalars)
        self._record(update, [*scalars, *gradients, *sent])
        ahead = _Ahead(self, update, scalars[0], after)
        for gradient, variable in zip(gradients, trainable, strict=True):
            if id(variable) in self._inventory.ahead:
                finish(ahead, variable, gradient, clip_scale)
            self._updated.add(id(variable))

    def _couple(
        self, update: Update, variable: ParameterServerVariable, gradient: tf.Tensor, scalars: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """What is sent of the whole `variable`, where its update may couple rows."""
        key, optimizer = id(variable), update.optimizer
        is_whole = variable.sharding is None
        if (is_whole and key not in self._tables) or is_known_to_treat_rows_alone(optimizer, variable):
            return []
        specs = [tf.TensorSpec(scalar.shape, scalar.dtype) for scalar in scalars]
        cached = (id(optimizer), key, gradient.dtype, *specs)
        coupled = self._inventory.coupled.get(cached)
        if coupled is None or not coupled.is_reusable:
            traced = trace_update(optimizer, variable, gradient.dtype, specs, update.shared, clips=update.has_clip_scale)
            coupled = CoupledUpdate(traced)
            self._inventory.coupled[cached] = coupled
        update.coupled[key] = coupled
        if is_whole or not coupled.needs_whole:
            return []
        if self._needs_whole(
            variable, f"optimizer {optimizer.name!r}, or its constraint, couples its rows, which are in shards"
        ):
            return []
        sent = coupled.sent(gradient, scalars, {id(v): self.read(v) for v in coupled.pulled})
        update.num_sent[key] = len(sent)
        return sent

    def _needs_whole(self, variable: ParameterServerVariable, reason: str) -> bool:
        """Notes that an update needs the whole `variable`; True where that is news, for which the trace is done again."""
        self.read_whole.setdefault(id(variable), reason)
        if id(variable) in self._tables:
            self._inventory.read_whole(variable, reason)
        return id(variable) in self._tables

    def _gradient_shape(self, variable: ParameterServerVariable) -> tf.TensorShape:
        return self._tables[id(variable)].rows.shape if id(variable) in self._tables else variable.storage.shape

    def record_update_step(self, gradients: Sequence[Any], trainable: Sequence[Any], learning_rate: Any) -> None:
        """Stands in for `TFOptimizer._backend_update_step`, which an optimizer may have wrapped (as Nadam does)."""
        self._applying = (list(gradients), list(trainable), learning_rate)

    def _accumulated_clip_scale(self, optimizer: Any, gradients: Sequence[tf.Tensor], trainable: Sequence[Any]) -> tf.Tensor:
        # The norm is over all variables and so over all ps tasks: the worker, which has every gradient, works it out.
        for variable in trainable:
            if self._needs_whole(variable, "`global_clipnorm` needs the norm of its accumulated gradient"):
                return tf.ones([])
        accumulated = [optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in trainable]
        means = [(g + a) / optimizer.gradient_accumulation_steps for g, a in zip(gradients, accumulated, strict=True)]
        norm = tf.linalg.global_norm(means)
        return optimizer.global_clipnorm / tf.maximum(norm, optimizer.global_clipnorm)

    def _record(self, update: Update, tensors: list[tf.Tensor]) -> None:
        if not self._in_control_flow():
            update.tensors = tensors
            self.updates.append(update)
            return
        graph = tf.compat.v1.get_default_graph()
        while graph is not self._graph:
            if "While" in type(graph).__name__:
                raise UnsupportedError(
                    "An optimizer was applied inside a `tf.while_loop` of `train_step`, and a step pushes its gradients once. "
                    f"Expected: `optimizer.apply` outside loops. Received: it inside one, for {update.optimizer.name!r}. "
                    "Unroll the loop in Python, or accumulate the gradients in the loop and apply them after it."
                )
            graph = graph.outer_graph
        keys: list[Hashable] = [("update", len(self.updates), i) for i in range(len(tensors) + 1)]
        flagged = [*tensors, tf.constant(True)]
        for key, tensor in zip(keys, flagged, strict=True):
            if key in self._scratch:
                tf.raw_ops.AssignVariableOp(resource=self._scratch[key], value=tensor)
            else:
                self._inventory.add_scratch(key, tf.TensorSpec(tensor.shape, tensor.dtype))
        update.tensors = [t if k not in self._scratch else self._read_in_root(k) for k, t in zip(keys, flagged, strict=True)]
        update.applied = update.tensors.pop()
        self.updates.append(update)

    def _read_in_root(self, key: Hashable) -> Callable[[], tf.Tensor]:
        # Read when the step is over, in the graph of the step; see `outputs`.
        return lambda: self._read_scratch(key)

    # Results

    def outputs(self) -> dict[str, Any]:
        """The tensors that leave the step."""
        for update in self.updates:
            update.tensors = [t() if callable(t) else t for t in update.tensors]
            if callable(update.applied):
                update.applied = update.applied()
                self._fit_tables(update)
        deltas, assigned = self.state_changes()
        return {
            "metrics": [self.read(v) for v in self._inventory.metrics.values()],
            "updates": [{"tensors": u.tensors, **({} if u.applied is None else {"applied": u.applied})} for u in self.updates],
            "deltas": [self._difference(v) for v in deltas],
            "assigned": [self._current(id(v), self._initial.get(id(v))) for v in assigned],
        }

    def _fit_tables(self, update: Update) -> None:
        # Where the gradients were not applied, what stands for those of rows has no rows.
        for index, variable in enumerate(update.variables, start=update.num_scalars):
            if id(variable) in self._tables:
                gradient, rows = update.tensors[index], self._tables[id(variable)].rows
                update.tensors[index] = tf.cond(update.applied, lambda g=gradient: g, lambda r=rows: tf.zeros_like(r))

    def state_changes(self) -> tuple[list[ParameterServerVariable], list[ParameterServerVariable]]:
        """Variables that are pushed as a difference, and those that are pushed as a value.

        A difference loses nothing when two workers push at once: counters, and the state of layers. The scalar state of an
        optimizer (a loss scale that is halved) does not add up, so there the last value stands.
        """
        deltas, assigned = [], []
        for key, variable in self._assigned.items():
            if variables.is_metric_state(variable) or variables.is_seed_state(variable):
                continue
            if variable.storage.dtype == tf.bool or key in self._inventory.optimizer_state:
                assigned.append(variable)
            else:
                deltas.append(variable)
        return deltas, assigned


def _shaped(gradient: tf.Tensor, shape: Any) -> tf.Tensor:
    return gradient if gradient.shape == tf.TensorShape(shape) else tf.ensure_shape(gradient, shape)


def leaves_of(batch: Any) -> list[tf.Tensor]:
    """The tensors of a batch; a leaf may be None, which is none."""
    return [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]


def _names(tensors: Sequence[tf.Tensor]) -> list[str]:
    return [tensor.op.name for tensor in tensors]
