"""The pull phase: each ps task sends a worker the values that a step starts from.

It sends dense variables whole, and of tables the rows that the step asks for. The worker joins the
shards of a variable that come from several ps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from kerasps.step.phases.step_context import StepContext
from kerasps.step.records.identity import ByIdentity
from kerasps.step.records.packing import Packing, brought_to
from kerasps.step.records.specs import sent_part, sent_value
from kerasps.step.rows.groups import GroupShard, TableGroup
from kerasps.step.rows.lookups import Round
from kerasps.step.rows.row_places import RowPlaces
from kerasps.step.rows.row_requests import RowRequest
from kerasps.step.updates.fused import FusedVariable
from kerasps.variables import ParameterServerVariable, Shard, call_with, shards_in

# The bytes of a part of a large model; two parts are in flight. This is enough to keep the network
# busy while the worker's message that a part has arrived is in flight.
PART_BYTES = 2**23

_Requests = Mapping[ParameterServerVariable, RowRequest]


class PullMessage(NamedTuple):
    """The message in which a worker asks one ps for rows, for each run of shards of tables there.

    It is sent as one int32 tensor: the counts, then the ids. With only one run, the ids alone.
    """

    counts: list[tf.Tensor]  # for each group, the number of elements of `ids` for each of its runs
    # For each group, the places of the rows in their storages, end to end; of tables without a
    # vocabulary the keys of the rows (see `AskedKeys.sent`).
    ids: list[tf.Tensor]

    @staticmethod
    def spec() -> tf.TensorSpec:
        """Return the spec of a message as it is sent."""
        return tf.TensorSpec([None], tf.int32)

    @classmethod
    def of(cls, requests: _Requests, groups: Sequence[GroupShard]) -> PullMessage:
        """Return the message for the rows that `requests` ask for in `groups`."""
        asked = [(requests[shard.group.tables[0]], shard) for shard in groups]
        return cls(
            [request.counts_of_runs(shard) for request, shard in asked],
            [request.ids_in(shard) for request, shard in asked],
        )

    def pack(self, num_runs: int) -> tf.Tensor:
        """Return the message as it is sent. Runs on the worker."""
        return _end_to_end(self.counts, self.ids, num_runs)

    @staticmethod
    def unpack(tensor: tf.Tensor, num_runs: int) -> tuple[tf.Tensor | None, list[tf.Tensor]]:
        """Return the number of ids of each run, and the ids, from the result of `pack`.

        Runs on the ps. With only one run, there are no numbers.
        """
        return _split_parts(tensor, num_runs)


class SentRequests(NamedTuple):
    """The requests of one step in one round, after they were sent."""

    requests: list[RowRequest]  # the requested rows of each group
    # The packed message that arrived on each ps, by the pull from it; no tensor if the step asks
    # that ps for no rows.
    messages: dict[DevicePull, list[tf.Tensor]]


class PullReply(NamedTuple):
    """The reply of one ps to a pull; holds tensors or their specs."""

    # The values of each fused variable: one tensor on the ps, a list with one for each shard on the
    # worker.
    fused: list[Any]
    dense: list[Any]  # the values of other shards that are pulled whole
    # The rows of each group: a list with those of each run on the ps, one tensor on the worker.
    rows: list[Any]
    # The number of pushes, or joints, that the ps had applied before it read these values, an int64
    # scalar; None if the pull does not read the clock.
    clock: Any


class DevicePull:
    """The pull from one ps, and the function that it runs there.

    Args:
        clock: reads the clock, on the ps; None for no clock.
    """

    def __init__(
        self,
        device: str,
        dense: list[Shard],
        groups: list[GroupShard],
        fused: Sequence[FusedVariable],
        clock: Callable[[], tf.Tensor] | None = None,
    ) -> None:
        in_fused = {shard for variable in fused for shard in variable.shards}
        self.device = device
        self.groups = groups
        # The runs of shards in `groups`.
        self.runs = [run for shard in groups for run in shard.runs]
        self._fused = list(fused)
        self._dense = [shard for shard in dense if shard not in in_fused]
        self._clock = clock
        clock_spec = None if clock is None else tf.TensorSpec([], tf.int64)
        rows = [shard.spec for shard in groups]
        of_runs = [[run.spec for run in shard.runs] for shard in groups]
        single = [sent_value(shard) for shard in self._dense]
        # Two structures of the same flat tensors: the ps sends fused values as one tensor.
        sent = Packing(
            PullReply([variable.spec for variable in fused], single, of_runs, clock_spec)
        )
        of_shards = [[sent_part(shard) for shard in variable.shards] for variable in fused]
        self.received = Packing(PullReply(of_shards, single, rows, clock_spec))

        def hand_out(messages: list[tf.Tensor]) -> list[tf.Tensor]:
            with tf.device(device):
                reply, has_row = self._reply(messages)
                return [*sent.pack(reply), *has_row]

        function = tf.function(hand_out, autograph=False)
        self.function = function.get_concrete_function(self._message_specs)
        self.captures = list(self.function.captured_inputs)

    @property
    def brings_clock(self) -> bool:
        """True if the pull returns the clock of the ps."""
        return self._clock is not None

    @property
    def _message_specs(self) -> list[tf.TensorSpec]:
        """The spec of the message that asks for rows; empty if the pull reads no rows."""
        return [PullMessage.spec()] if self.runs else []

    @property
    def known_specs(self) -> list[tf.TensorSpec]:
        """The specs of what a ps knows of the pull in the push: the message.

        And which rows there were, if some may leave.
        """
        may_leave = any(run.may_leave for run in self.runs)
        has_row = [tf.TensorSpec([None], tf.bool)] if may_leave else []
        return [*self._message_specs, *has_row]

    def places(self, known: Sequence[tf.Tensor]) -> RowPlaces:
        """Return the places of the rows that a message asks for, for each of `runs`.

        Runs on the ps, in its pull, which knows the message, and in its push (see `known_specs`).
        """
        places = RowPlaces({})
        for message in known[:1]:
            lengths, ids = PullMessage.unpack(message, len(self.runs))
            asked = {run: run.asked(part) for run, part in zip(self.runs, ids, strict=True)}
            for has_row in known[1:]:
                leaving = [run for run in self.runs if run.may_leave]
                sizes = [tf.size(asked[run].keys) for run in leaving]
                for run, part in zip(leaving, tf.split(has_row, sizes), strict=True):
                    asked[run] = asked[run]._replace(had_row=part)
            places.add(RowPlaces(asked, lengths))
        return places

    def _reply(self, messages: Sequence[tf.Tensor]) -> tuple[PullReply, list[tf.Tensor]]:
        """Read the requested values, and which rows there are of those that may leave.

        Runs on the ps.
        """
        clock = None if self._clock is None else self._clock()
        # The clock is read first, so that it misses no push that is applied meanwhile.
        with tf.control_dependencies([] if clock is None else [clock]):
            places = self.places(messages)
            found = [[run.read(places[run]) for run in shard.runs] for shard in self.groups]
            reply = PullReply(
                [variable.values.read_value() for variable in self._fused],
                [shard.storage.read_value() for shard in self._dense],
                [[rows for rows, _ in of_shard] for of_shard in found],
                clock,
            )
            has_row = [flag for of_shard in found for _, flags in of_shard for flag in flags]
            return reply, [tf.concat(has_row, 0)] if has_row else []

    def ask(self, steps: Sequence[_Requests]) -> list[list[tf.Tensor]]:
        """Send the requests of some steps to the ps in one message; return each, on the ps."""
        if not self.runs:
            return [[] for _ in steps]
        messages = [
            PullMessage.of(requests, self.groups).pack(len(self.runs)) for requests in steps
        ]
        lengths = [tf.shape(message) for message in messages]
        # Sent before the calls: as an argument of the pull and of the push, it would wait for the
        # push before.
        (arrived,) = brought_to(self.device, [_end_to_end(lengths, messages, len(messages))])
        with tf.device(self.device):
            return [[part] for part in _split_parts(arrived, len(messages))[1]]

    def add_to(
        self, step: StepContext
    ) -> tuple[dict[Shard, tf.Tensor], dict[GroupShard, tf.Tensor]]:
        """Pull what the step asked for; return the values of dense shards and rows of groups."""
        waits = step.before_pull.get(self.device, [])
        with tf.device(self.device), tf.control_dependencies(waits):
            flats = call_with(step.pull_handles, self.function, self.captures, step.messages[self])
        num_flats = len(self.received.carrier_specs)
        # What the push needs stays on the ps.
        step.known_rows[self] = [*step.messages[self], *flats[num_flats:]]
        flats = self._in_order(flats[:num_flats])
        sizes = [step.requests[shard.group.tables[0]].num_rows_in(shard) for shard in self.groups]
        reply = self.received.unpack_by_call(flats, sizes, step.device)
        if reply.clock is not None:
            step.clocks[self.device] = reply.clock
        values = dict(zip(self._dense, reply.dense, strict=True))
        for variable, of_shards in zip(self._fused, reply.fused, strict=True):
            values.update(zip(variable.shards, of_shards, strict=True))
        return values, dict(zip(self.groups, reply.rows, strict=True))

    def _in_order(self, flats: list[tf.Tensor]) -> list[tf.Tensor]:
        """Bring tensors of the ps to the worker, large ones in their order.

        TensorFlow would send all at once, and the first would arrive as late as the last. So two
        parts are in flight at a time, and the arrival of a part starts the next part but one.
        """
        parts = self.received.in_parts(flats, PART_BYTES)
        if len(parts) < 3:
            return flats
        arrived: list[list[tf.Tensor]] = []
        for number, part in enumerate(parts):
            if number >= 2:
                with tf.device(self.device), tf.control_dependencies(arrived[number - 2]):
                    part = [tf.identity(tensor) for tensor in part]
            arrived.append([tf.identity(tensor) for tensor in part])
        return [tensor for part in arrived for tensor in part]


class RoundPull:
    """One round trip to every ps that has values for it (see `lookups.Round`).

    Args:
        devices: ps to pull from even if only their clocks are read.
    """

    def __init__(
        self,
        dense: Sequence[ParameterServerVariable],
        fused: Sequence[FusedVariable],
        found: Round,
        clocks: Mapping[str, Callable[[], tf.Tensor]],
        devices: Iterable[str] = (),
    ) -> None:
        self.round = found
        self._dense = list(dense)
        held = shards_in(dense)
        rows = [shard for group in found.groups for shard in group.shards]
        self.pulls = [
            DevicePull(
                device,
                [shard for shard in held if shard.device == device],
                [shard for shard in rows if shard.device == device],
                [variable for variable in fused if variable.device == device],
                clocks.get(device),
            )
            for device in sorted(
                {*devices, *(shard.device for shard in held), *(shard.device for shard in rows)}
            )
        ]

    def can_ask(self, known: Mapping[str, tf.Tensor]) -> bool:
        """Return True if the ids of the rows follow from `known`."""
        return all(name in known for name in self.round.inputs)

    def ask(
        self, handles: dict[int, tf.Tensor], steps: Sequence[Mapping[str, tf.Tensor]]
    ) -> list[SentRequests]:
        """Ask every ps for the rows that steps with these known tensors need, in one message."""
        requests = [self.round.requests(handles, known) for known in steps]
        by_table = [_by_table(of_step) for of_step in requests]
        sent = [pull.ask(by_table) for pull in self.pulls]
        return [
            SentRequests(of_step, dict(zip(self.pulls, messages, strict=True)))
            for of_step, *messages in zip(requests, *sent, strict=True)
        ]

    def add_to(self, step: StepContext) -> None:
        """Pull from every ps, and join the shards of each variable.

        Asks for the rows first, unless that was done ahead.
        """
        asked = step.asked.get(self) or self.ask(step.handles, [step.known])[0]
        requests = asked.requests
        step.requests.update(_by_table(requests))
        step.messages.update(asked.messages)
        values: dict[Shard, tf.Tensor] = {}
        rows: dict[GroupShard, tf.Tensor] = {}
        for pull in self.pulls:
            ps_values, ps_rows = pull.add_to(step)
            values.update(ps_values)
            rows.update(ps_rows)
        step.add_values((variable, _join(variable, values)) for variable in self._dense)
        for request in requests:
            group = request.group
            joined = request.join([rows[shard] for shard in group.shards])
            of_tables = zip(group.tables, request.split(joined), request.find(joined), strict=True)
            for table, table_rows, found in of_tables:
                step.add_table(table, table_rows, request.positions(table), found)


class PullPhase:
    """The pull of a step (see `StepPhase`): one round trip, or several if ids depend on rows.

    Args:
        dense: the variables that are pulled whole, in the first round.
        fused: the fused variables, which hold some of `dense`.
        clocks: for each ps that the step pushes to, the function that reads its clock, by device.
        needs_clocks: whether to read also the clocks of ps from which the step reads nothing else.
    """

    def __init__(
        self,
        dense: Sequence[ParameterServerVariable],
        rounds: Sequence[Round],
        fused: Sequence[FusedVariable],
        clocks: Mapping[str, Callable[[], tf.Tensor]],
        *,
        needs_clocks: bool = False,
    ) -> None:
        self.rounds: list[RoundPull] = []
        unread = dict(clocks)
        for found in rounds:
            is_last = found is rounds[-1]
            devices = unread if needs_clocks and is_last else ()
            self.rounds.append(RoundPull(dense, fused, found, unread, devices))
            for pull in self.rounds[-1].pulls:
                unread.pop(pull.device, None)
            dense = fused = ()  # pulled in the first round

    @property
    def pulls(self) -> list[DevicePull]:
        """The pulls of all rounds."""
        return [pull for round_pull in self.rounds for pull in round_pull.pulls]

    @property
    def groups(self) -> list[TableGroup]:
        """The groups of tables, of all rounds."""
        return [group for round_pull in self.rounds for group in round_pull.round.groups]

    @property
    def functions(self) -> list[Any]:
        """The functions that compute ids, and those that run on the ps."""
        finds = [round_pull.round.find for round_pull in self.rounds if round_pull.round.groups]
        return [*finds, *(pull.function for pull in self.pulls)]

    @property
    def captures(self) -> list[tf.Tensor]:
        """The handles that the functions on the ps captured."""
        return [captured for pull in self.pulls for captured in pull.captures]

    def ask_ahead(
        self, handles: dict[int, tf.Tensor], steps: Sequence[Mapping[str, tf.Tensor]]
    ) -> list[dict[RoundPull, SentRequests]]:
        """Ask for all rows of some steps whose ids follow from their batches, in one message.

        Each message costs the worker and the ps some 0.2 ms, however short it is.

        Args:
            steps: the batches of each step, by the names of the compute phase's inputs.

        Returns the requests of each step, by the round in which they are pulled.
        """
        ahead = [
            round_pull
            for round_pull in self.rounds
            if round_pull.round.groups and round_pull.can_ask(steps[0])
        ]
        asked = [round_pull.ask(handles, steps) for round_pull in ahead]
        return [
            {round_pull: a[i] for round_pull, a in zip(ahead, asked, strict=True)}
            for i in range(len(steps))
        ]

    def add_to(self, step: StepContext) -> None:
        """Set `requests` and `messages` of the context, and values and tables of its replicas."""
        for round_pull in self.rounds:
            round_pull.add_to(step)


def _end_to_end(
    lengths: Sequence[tf.Tensor], parts: Sequence[tf.Tensor], num_parts: int
) -> tf.Tensor:
    """Return lengths and parts end to end; return a single part alone."""
    return parts[0] if num_parts == 1 else tf.concat([*lengths, *parts], 0)


def _split_parts(tensor: tf.Tensor, num_parts: int) -> tuple[tf.Tensor | None, list[tf.Tensor]]:
    """Return the lengths (None for a single part) and the parts that `_end_to_end` has joined."""
    if num_parts == 1:
        return None, [tensor]
    lengths, parts = tf.split(tensor, [num_parts, -1])
    return lengths, list(tf.split(parts, lengths, num=num_parts))


def _by_table(
    requests: Iterable[RowRequest],
) -> ByIdentity[ParameterServerVariable, RowRequest]:
    return ByIdentity((table, request) for request in requests for table in request.group.tables)


def _join(variable: ParameterServerVariable, values: Mapping[Shard, tf.Tensor]) -> tf.Tensor:
    shards = [values[shard] for shard in shards_in([variable])]
    return shards[0] if variable.sharding is None else variable.sharding.join(shards)
