"""The position of a training: the content of a backup beside the variables on the ps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import keras
import numpy as np

from kerasps import _compat
from kerasps.training.epoch.epoch_events import SplitPosition
from kerasps.variables import ParameterServerVariable, is_seed_state

# Raised when an older record could be misread.
VERSION = 1
# The name under which Keras keeps its global seed generator; a constant of Keras from 3.13 on.
_GLOBAL_SEED_GENERATOR = "global_seed_generator"


@dataclass(frozen=True, eq=False)
class LoopPosition:
    """The position of the loop, when nothing is in flight and all results are counted."""

    steps: int  # the number of counted steps of the epoch
    # The sums of their metric states, in the order of `TracedStep.metrics`; empty if there are
    # none.
    metrics: list[np.ndarray]
    logs: dict[str, np.ndarray]  # the logs that the last step returned beside the metrics
    first_step: int  # the global number of the epoch's first step
    next_step: int  # the global number of the next step
    # For each seed generator of the step, the state from which the next step draws.
    seeds: list[np.ndarray]
    # The position of each split of the input, followed by the parts of divided splits; None if the
    # next epoch begins a pass.
    splits: list[SplitPosition] | None
    input: dict[str, Any]  # the return value of `Input.position`


@dataclass(frozen=True, eq=False)
class Position:
    """The position of `fit`."""

    epoch: int  # the number of the epoch that resumes, or of the next one
    loop: LoopPosition  # the position of its loop
    # The return value of `Input.position` of the validation data; None without them.
    validation: dict[str, Any] | None
    # The states of the model's `keras.random.SeedGenerator`s, in their order.
    seed_states: list[np.ndarray]
    # The state of Keras's global generator; None if it has none yet.
    global_seed_state: np.ndarray | None
    # The states of callbacks, in their order; None for each that saves none.
    callbacks: list[dict[str, Any] | None]

    def to_record(self) -> dict[str, Any]:
        """Return it as dictionaries and lists, of arrays and of values that JSON can represent."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Position:
        """Return the position from a record that `to_record` returned.

        Raises ValueError if the record is of another version of kerasps.
        """
        fields = dict(record)
        version = fields.pop("version", None)
        if version != VERSION:
            raise ValueError(
                "A backup was made by another version of kerasps. Expected: a record of version "
                f"{VERSION}. Received: version {version!r}. Finish the training with the version "
                "that made it, or delete the backup."
            )
        loop = LoopPosition(**fields["loop"])
        if loop.splits is not None:
            loop = replace(loop, splits=[SplitPosition(*split) for split in loop.splits])
        return cls(**{**fields, "loop": loop})


class CannotResumeError(Exception):
    """A position is not one of this training; the message gives the reason."""


def seed_states_of(
    model: keras.Model, others: Iterable[ParameterServerVariable]
) -> list[ParameterServerVariable]:
    """Return the states of all seed generators of a model, and those of `others` that it lacks."""
    states = {id(v): v for v in [*model.variables, *others] if is_seed_state(v)}
    return list(states.values())


def global_seed_state() -> np.ndarray | None:
    """Return the state of Keras's global seed generator; None if nothing was drawn from it."""
    generator = vars(_compat.global_state).get(_GLOBAL_SEED_GENERATOR)
    return None if generator is None else np.asarray(generator.state)


def set_global_seed_state(state: np.ndarray) -> None:
    """Set the state of Keras's global seed generator."""
    _compat.global_seed_generator().state.assign(state)
