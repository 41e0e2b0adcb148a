"""Variables on ps tasks that each worker's process knows by the same name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.dynamic import add_key_pools
from kerasps.runtime.devices import ps_device
from kerasps.strategy_arguments import Partitioner
from kerasps.variables import NamedVariable, shards_in
from kerasps.variables.placing.placement import Held, PlacementLedger
from kerasps.variables.placing.placing import Extended
from kerasps.variables.storage.named import NamedIndex
from kerasps.worker_driven.run import Run


class SharedVariable(NamedVariable):
    """A variable on a ps that several processes share; it outlives them."""

    def __init__(
        self,
        initial_value: Callable[[], object] | None,
        *,
        shape: tf.TensorShape | Sequence[int],
        dtype: tf.DType | str,
        trainable: bool,
        name: str,
        run: Run,
    ) -> None:
        self._run = run
        self._given_name = name
        self._gave_initial_value = self._is_there = False
        super().__init__(initial_value, shape=shape, dtype=dtype, trainable=trainable, name=name)

    @property
    def takes_values(self) -> bool:
        return self._run.writes or self._gave_initial_value

    def _claim_name(self, kind: Hashable) -> str:
        return self._run.name_of(self._given_name, kind)

    def _takes_initial_value(self) -> bool:
        run = self._run
        self._gave_initial_value = run.is_new or (run.is_chief and not run.is_ready(self))
        return self._gave_initial_value

    def _destroy_with_object(self, kind: Hashable) -> None:
        """Keep the resource on the ps when Python collects this object."""

    def _read_variable_op(self, *args: object, **kwargs: object) -> Any:
        if not self._is_there and tf.executing_eagerly():
            self._run.wait_for_value(self)
            self._is_there = True
        return super()._read_variable_op(*args, **kwargs)

    def assign(self, value: object, *args: object, **kwargs: object) -> Any:
        if tf.executing_eagerly() and not self.takes_values:
            return self
        return super().assign(value, *args, **kwargs)


class SharedIndex(NamedIndex):
    """An index on a ps that several processes share; it outlives them."""

    def __init__(self, device: str, num_buckets: int, *, run: Run) -> None:
        self._run = run
        super().__init__(device, num_buckets)

    def _claim_name(self, kind: Hashable) -> str:
        return self._run.name_of(f"index on {self.device}", kind)

    def _destroy_with_object(self, kind: Hashable) -> None:
        """Keep the resource on the ps when Python collects this object."""


class _LastingLedger(PlacementLedger):
    """Counts all variables that were ever made, also those that Python has collected.

    Python collects unused variables at another time in each process. But the next variable must go
    to the same ps in each.
    """

    def __init__(self, num_ps: int) -> None:
        super().__init__(num_ps)
        self._ever_held: list[Held] = []

    def _note(self, variable: tf.Variable, held: Held) -> None:
        super()._note(variable, held)
        self._ever_held.append(held)

    def _for_choice(self) -> list[Held]:
        return self._ever_held


class SharedExtended(Extended):
    """Places variables as `Extended` does, on the same ps in each worker's process."""

    # Each worker would write its copy back, over the updates of others.
    may_fuse = False

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        cluster_resolver: ClusterResolver,
        variable_partitioner: Partitioner | None,
        shard_layout: str,
        run: Run,
    ) -> None:
        super().__init__(strategy, cluster_resolver, variable_partitioner, shard_layout)
        self.ledger = _LastingLedger(self.num_ps)
        self.run = run
        self.new_variable = functools.partial(SharedVariable, run=run)
        self.new_index = functools.partial(SharedIndex, run=run)
        add_key_pools(self, is_lasting=True)

    @property
    def restores(self) -> bool:
        return self.run.writes

    def before_steps(self, variables: Iterable[keras.Variable]) -> None:
        storages = [shard.storage for shard in shards_in(list(variables))]
        shared = [*storages, *self.key_pools.variables]
        self.run.begin_steps([s for s in shared if isinstance(s, SharedVariable)])

    def _create_variable(self, next_creator: Callable[..., object], **kwargs: Any) -> Any:
        if self._placing.active or "colocate_with" in kwargs:
            return super()._create_variable(next_creator, **kwargs)
        _compat.check_not_keras_2(kwargs.get("name"))
        # A bare `tf.Variable`, whose shape may follow from its value.
        initial_value = kwargs["initial_value"]
        value = initial_value() if callable(initial_value) else initial_value
        value = tf.convert_to_tensor(value, kwargs.get("dtype"))
        known = {
            "initial_value": lambda: value,
            "shape": value.shape,
            "dtype": value.dtype,
            "trainable": kwargs.get("trainable") is not False,
            "name": kwargs.get("name") or "Variable",
        }
        num_bytes = value.shape.num_elements() * value.dtype.size
        device = ps_device(self.ledger.place(num_bytes))
        return self._create_on(device, self._make_variable, known, is_placed=True)
