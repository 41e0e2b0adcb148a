"""The push phase: a worker sends each ps the gradients and new values that belong there.

One push at a time holds the lock of a ps, so an update reads and writes the slots of its variables
undisturbed and concurrent workers lose nothing. Everything that a push needs has arrived before it
takes the lock, so a worker that dies cannot hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasps.runtime.on_ps import under_lock
from kerasps.step.phases.pull import DevicePull
from kerasps.step.phases.push_message import DeviceChanges, PushMessage, StepChanges
from kerasps.step.phases.step_context import StepContext
from kerasps.step.phases.update_rules import UpdateRule
from kerasps.step.records.packing import Packing, brought_to
from kerasps.step.rows.row_places import RowPlaces
from kerasps.variables import call_with

_Mutex = Callable[[str], tf.Tensor]


class DevicePush:
    """The push to one ps, from which `pulls` are, and the function that it runs there."""

    def __init__(
        self,
        device: str,
        changes: DeviceChanges,
        pulls: Sequence[DevicePull],
        mutex: _Mutex,
        rule: UpdateRule,
    ) -> None:
        self.device = device
        # The runs of shards whose gradients are rows, those of a group together.
        self.tables = changes.tables
        self._changes = changes
        # The message of the pull has told the ps the rows of the gradients.
        sent = {run for runs in self.tables for run in runs}
        self._pulls = [pull for pull in pulls if sent & set(pull.runs)]
        clocked = any(pull.brings_clock for pull in pulls)
        kinds = {"clocked": clocked, "numbered": rule.numbers_calls}
        # Packs the message.
        self.packing: Packing[PushMessage] = Packing(changes.sent_specs(**kinds))
        self._received: Packing[PushMessage] = Packing(changes.received_specs(**kinds))
        self._rule = rule
        rule.hold(device, changes, self._received.specs)

        def take_in(known: list[list[tf.Tensor]], flats: list[tf.Tensor]) -> None:
            with tf.device(device):
                self._take_in(known, flats, mutex)

        # Not inlined: when a worker is lost, its step's operations on the ps end at any point, but
        # a function that they have called runs to its end.
        self.function = tf.function(
            take_in, autograph=False, experimental_attributes={"_noinline": True}
        ).get_concrete_function(
            [pull.known_specs for pull in self._pulls], self.packing.carrier_specs
        )
        self.captures = list(self.function.captured_inputs)

    def add_to(self, step: StepContext) -> None:
        """Send the ps the outputs of the step that belong there."""
        # The lock waits for these tensors, as the update does, so it is taken once they arrived.
        packed = self.packing.pack_by_call(self._changes.select(step), step.device)
        flats = brought_to(self.device, packed)
        known = [step.known_rows[pull] for pull in self._pulls]
        graph = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        with tf.device(self.device):
            call_with(step.handles, self.function, self.captures, known, flats)
        step.pushes[self.device] = graph.get_operations()[start:]

    def _take_in(
        self,
        known: list[list[tf.Tensor]],
        flats: list[tf.Tensor],
        mutex: _Mutex,
    ) -> None:
        """Apply the push that has arrived, under the lock, once. Runs on the ps."""
        places = RowPlaces({})
        for pull, of_pull in zip(self._pulls, known, strict=True):
            places.add(pull.places(of_pull))
        lengths = [places.number(runs) for runs in self.tables]
        message = self._received.unpack(flats, lengths)
        taken, unlocked = under_lock(
            mutex(self.device),
            lambda: self._rule.take_in(self.device, self._changes, message, places),
            after=tf.nest.flatten([known, flats]),
        )
        with tf.control_dependencies([unlocked]):
            self._rule.after_lock(self.device, taken)


class PushPhase:
    """The push of a step (see `StepPhase`), to each ps that it changes."""

    def __init__(
        self,
        changes: StepChanges,
        pulls: Sequence[DevicePull],
        mutex: _Mutex,
        rule: UpdateRule,
    ) -> None:
        self.changes = changes  # the changes of the step
        self.rule = rule  # decides when a push takes effect
        self._given = changes, pulls, mutex
        self.pushes = [
            DevicePush(
                device,
                changes.on(device),
                [pull for pull in pulls if pull.device == device],
                mutex,
                rule,
            )
            for device in changes.devices
        ]

    @property
    def functions(self) -> list[Any]:
        """The functions that run on the ps."""
        return [push.function for push in self.pushes]

    def redoing(self) -> PushPhase:
        """Return the push of steps that some ps may have applied before."""
        return PushPhase(*self._given, self.rule.redoing())

    @property
    def devices(self) -> list[str]:
        """The devices of the ps that the step pushes to."""
        return [push.device for push in self.pushes]

    @property
    def captures(self) -> list[tf.Tensor]:
        """The handles that these functions captured."""
        return [captured for push in self.pushes for captured in push.captures]

    def add_to(self, step: StepContext) -> None:
        """Push the outputs in the context."""
        for push in self.pushes:
            push.add_to(step)
