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

# Goes up when a record of before could be misread.
VERSION = 1
# The name under which Keras keeps its own seed generator; a constant of Keras's from 3.13 on.
_GLOBAL_SEED_GENERATOR = "global_seed_generator"


@dataclass(frozen=True, eq=False)
class LoopPosition:
    """The position of the loop, when nothing is in flight and all results are counted.

    Attributes:
        steps: the steps of the epoch that are counted.
        metrics: what they add up to, in the order of `TracedStep.metrics`; empty where there are
            none.
        logs: what the last of them returned beside the metrics.
        first_step: the global number of the epoch's first step.
        next_step: the global number of the next step.
        seeds: of each seed generator of the step, the state that the next step draws from.
        splits: where each split of the input stands, and behind them the parts into which some were
            divided; None where the next epoch begins a pass.
        input: what `Input.position` returned.
    """

    steps: int
    metrics: list[np.ndarray]
    logs: dict[str, np.ndarray]
    first_step: int
    next_step: int
    seeds: list[np.ndarray]
    splits: list[SplitPosition] | None
    input: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Position:
    """The position of `fit`.

    Attributes:
        epoch: the number of the epoch that goes on, or that is to begin.
        loop: where its loop stands.
        validation: what `Input.position` of the validation data returned; None without.
        seed_states: the states of the model's `keras.random.SeedGenerator`s, in their order.
        global_seed_state: that of Keras's own, None where it has none yet.
        callbacks: what callbacks know, in their order; None for those whose state is theirs alone.
    """

    epoch: int
    loop: LoopPosition
    validation: dict[str, Any] | None
    seed_states: list[np.ndarray]
    global_seed_state: np.ndarray | None
    callbacks: list[dict[str, Any] | None]

    def to_record(self) -> dict[str, Any]:
        """Return it as dictionaries and lists of arrays and of values that JSON can hold."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Position:
        """Return the position that `to_record` was called for.

        Raises:
            ValueError: the record is of another version of kerasps.
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
    """A position is not one of this training; its words say why."""


def seed_states_of(
    model: keras.Model, others: Iterable[ParameterServerVariable]
) -> list[ParameterServerVariable]:
    """Return the states of all seed generators of a model, and those of `others` that it lacks."""
    states = {id(v): v for v in [*model.variables, *others] if is_seed_state(v)}
    return list(states.values())


def global_seed_state() -> np.ndarray | None:
    """Return the state of Keras's own seed generator; None where nothing was drawn from it."""
    generator = _compat.get_global_attribute(_GLOBAL_SEED_GENERATOR)
    return None if generator is None else np.asarray(generator.state)


def set_global_seed_state(state: np.ndarray) -> None:
    """Set the state of Keras's own seed generator."""
    _compat.global_seed_generator().state.assign(state)
