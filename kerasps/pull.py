"""The pull phase: what one ps task hands out to a worker at the start of a step, as one tensor.

Dense variables come whole, tables by the rows that the step asks for. A variable that is in shards comes from several ps and is
put together on the worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasps.compute import spec_of
from kerasps.packing import Packing, brought_to
from kerasps.parts import Part, parts_of
from kerasps.rows import Round, RowRequest
from kerasps.storage import call_with
from kerasps.variables import ParameterServerVariable
from kerasps.vectors import Vector


class DevicePull:
    """The pull from one ps: what is read there, how it travels, and the function that reads it.

    Args:
        device: the device of the ps.
        dense: what is read whole.
        tables: the shards of tables of which rows are read.
        vectors: those that hold some of `dense`.
    """

    def __init__(self, device: str, dense: list[Part], tables: list[Part], vectors: Sequence[Vector]) -> None:
        in_vectors = dict.fromkeys(part for vector in vectors for part in vector.parts)
        single = [part for part in dense if part not in in_vectors]
        self.device = device
        self.dense = [*in_vectors, *single]
        self.tables = tables
        rows = [rows_spec(part.variable) for part in tables]
        self.packing = Packing([*(part.spec for part in self.dense), *rows])
        # The same, with what lies end to end already.
        packed = Packing([*(vector.spec for vector in vectors), *(part.spec for part in single), *rows])

        def hand_out(*message: tf.Tensor) -> list[tf.Tensor]:
            with tf.device(device):
                rows = [
                    tf.raw_ops.ResourceGather(resource=part.storage.handle, indices=ids, dtype=part.storage.dtype)
                    for part, ids in zip(tables, self.ids_in(*message), strict=True)
                ]
                stored = [*(vector.values for vector in vectors), *(part.storage for part in single)]
                return packed.pack([*(variable.read_value() for variable in stored), *rows])

        function = tf.function(hand_out, autograph=False)
        self.function = function.get_concrete_function(*self.message_specs)
        self.captures = list(self.function.captured_inputs)

    @property
    def message_specs(self) -> list[tf.TensorSpec]:
        """The message that asks for rows; a pull of dense variables alone needs none."""
        return [tf.TensorSpec([None], tf.int32)] if self.tables else []

    def message(self, requests: dict[int, RowRequest]) -> list[tf.Tensor]:
        """Which rows are asked for: how many of each table, and their places in the shard, all in one tensor on the ps."""
        ids = [requests[id(part.variable)].ids[part.shard] for part in self.tables]
        if len(ids) > 1:
            counts = [requests[id(part.variable)].counts[part.shard] for part in self.tables]
            ids = [tf.concat([tf.stack(counts), *ids], 0)]
        # Not left to the calls: as an argument of the pull and of the push, it would wait for the push before.
        return brought_to(self.device, ids)

    def ids_in(self, *message: tf.Tensor) -> list[tf.Tensor]:
        """The places in the shard of each of `tables`, from the message."""
        count = len(self.tables)
        if count < 2:
            return list(message)
        return list(tf.split(message[0][count:], message[0][:count], num=count))

    def __call__(
        self, handles: dict[int, tf.Tensor], message: list[tf.Tensor], requests: dict[int, RowRequest]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The values of `dense`, and the rows of `tables`, in a graph that finds variables by `handles`."""
        with tf.device(self.device):
            flats = call_with(handles, self.function, self.captures, *message)
        counts = [requests[id(part.variable)].counts[part.shard] for part in self.tables]
        values = self.packing.unpack(flats, counts)
        return values[: len(self.dense)], values[len(self.dense) :]


class RoundPull:
    """One round trip to every ps that holds something of it (see `rows.Round`).

    Args:
        dense: variables that are pulled whole.
        vectors: those that hold some of `dense`.
        found: the row requests of the round.
    """

    def __init__(self, dense: Sequence[ParameterServerVariable], vectors: Sequence[Vector], found: Round) -> None:
        self.round = found
        self._dense = list(dense)
        held, rows = parts_of(dense), parts_of(found.tables)
        devices = sorted({part.storage.device for part in [*held, *rows]})
        self.pulls = [
            DevicePull(
                device,
                [part for part in held if part.storage.device == device],
                [part for part in rows if part.storage.device == device],
                [vector for vector in vectors if vector.device == device],
            )
            for device in devices
        ]

    def __call__(
        self, handles: dict[int, tf.Tensor], available: dict[str, tf.Tensor], step: PulledStep
    ) -> tuple[dict[int, tf.Tensor], dict[int, tf.Tensor]]:
        """The values of dense variables and the rows of tables, by the variables' `id`, in the graph of an execution."""
        requests = self.round.requests(handles, available)
        step.requests.update(requests)
        parts: dict[int, dict[int, tf.Tensor]] = {}
        for pull in self.pulls:
            step.messages[pull] = pull.message(requests)
            dense, rows = pull(handles, step.messages[pull], requests)
            for part, value in zip([*pull.dense, *pull.tables], [*dense, *rows], strict=True):
                parts.setdefault(id(part.variable), {})[part.shard] = value
        values = {id(v): _join(v, parts[id(v)]) for v in self._dense}
        return values, {id(t): _in_order(parts[id(t)]) for t in self.round.tables}


class PulledStep:
    """What a step asked for, which its push refers to."""

    def __init__(self) -> None:
        self.requests: dict[int, RowRequest] = {}
        self.messages: dict[DevicePull, list[tf.Tensor]] = {}


def _join(variable: ParameterServerVariable, shards: dict[int, tf.Tensor]) -> tf.Tensor:
    sharding = variable.sharding
    return shards[0] if sharding is None else sharding.join([shards[i] for i in range(len(shards))])


def _in_order(shards: dict[int, tf.Tensor]) -> tf.Tensor:
    return shards[0] if len(shards) == 1 else tf.concat([shards[i] for i in range(len(shards))], 0)


def rows_spec(table: ParameterServerVariable) -> tf.TensorSpec:
    """The `tf.TensorSpec` of some rows of a table."""
    spec = spec_of(table)
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def build_pulls(
    pulled: Sequence[ParameterServerVariable], rounds: Sequence[Round], vectors: Sequence[Vector]
) -> list[RoundPull]:
    """The round trips of a step's pull; dense variables, and the vectors that hold some of them, come with the first."""
    return [
        RoundPull(pulled, vectors, found) if number == 0 else RoundPull([], [], found) for number, found in enumerate(rounds)
    ]


def captures_of(pulls: Sequence[RoundPull]) -> list[Any]:
    """The handles that the pulls captured."""
    return [captured for rounds in pulls for pull in rounds.pulls for captured in pull.captures]
