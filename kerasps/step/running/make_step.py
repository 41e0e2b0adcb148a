"""Makes the step of a model for an input, or returns the one that was made before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from kerasps.errors import InputError, KeraspsError
from kerasps.inputs import Input
from kerasps.step.contract.host import step_host_of
from kerasps.step.records.mode import PREDICT, TEST, TRAIN, Mode
from kerasps.step.running.traced_step import TracedStep

# The most steps of a model in one mode, for batches of different shapes. Each keeps a trace and its
# step graphs on the coordinator, some megabytes, and a script uses few in turn.
MAX_STEPS = 8


def step_for(model: keras.Model, mode: Mode, inputs: Input) -> TracedStep:
    """Return the model's step for batches of `inputs`, on the devices of all workers.

    Raises InputError if the model cannot take such batches and the reason is known.
    """
    devices = step_host_of(model).devices_of_workers()
    with explaining(model, mode, inputs.element_spec, inputs.differences):
        return step_function(model, mode, inputs.element_spec, devices)


@contextlib.contextmanager
def explaining(
    model: keras.Model, mode: Mode, element_spec: object, differences: str | None = None
) -> Iterator[None]:
    """In this context, explain why no step can be traced for some batches.

    Raises InputError if the reason is known.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError) as exc:
        text = _differing(differences) or _unbatched(model, element_spec)
        text = text or _without_y(model, mode, element_spec)
        if text is None or isinstance(exc, KeraspsError):
            raise
        raise InputError(f"{text} The model's error: {exc}") from exc


def _differing(differences: str | None) -> str | None:
    if differences is None:
        return None
    return (
        "The model takes no batches that are of different shapes on different workers. "
        f"Received: {differences}. Make `dataset_fn` return the same on each worker."
    )


def _unbatched(model: keras.Model, element_spec: object) -> str | None:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    wanted_specs, specs = keras.tree.flatten(_inputs_of(model)), keras.tree.flatten(x)
    for wanted, spec in zip(wanted_specs, specs, strict=False):
        rank = getattr(getattr(spec, "shape", None), "rank", None)
        if rank is None:  # of a shape that is not known, or for None
            continue
        expected = f"Expected: x of shape {tuple(wanted.shape)}. Received: x of shape {spec.shape}."
        # The first axis is that of the batch; its length mostly differs from batch to batch.
        if rank == len(wanted.shape) - 1 and (rank == 0 or spec.shape[0] is not None):
            return f"The input is not batched. {expected} Call `.batch(32)` of the dataset."
        if rank == len(wanted.shape) + 1 and spec.shape[0] is None and spec.shape[1] is None:
            return f"The input is batched twice. {expected} Leave out one `batch` of the dataset."
    return None


def _without_y(model: keras.Model, mode: Mode, element_spec: object) -> str | None:
    _, y, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    if y is None and mode is not PREDICT and getattr(model, "loss", None) is not None:
        return (
            "The model was compiled with a loss, which compares its outputs with y. Expected: y, "
            "or a dataset of (x, y). Received: x alone. Give y, or compile without a loss where "
            "the model adds its own (`add_loss`)."
        )
    return None


def _inputs_of(model: keras.Model) -> Any:
    """Return the symbolic inputs of a model, or () if it has none."""
    return getattr(model, "inputs", None) or ()


def step_function(
    model: keras.Model,
    mode: Mode,
    element_spec: object,
    devices: Sequence[Sequence[str]],
    *,
    fused: bool = True,
) -> TracedStep:
    """Return the model's step for batches of `element_spec`; make a new one if none serves.

    The trace builds layers and optimizers that are not built yet, as Keras's does.
    """
    host = step_host_of(model)
    fused = fused and host.extended.may_fuse
    recent = _recent_steps(model, mode)
    function = next((step for step in recent if step.serves(element_spec, fused=fused)), None)
    if function is None:
        function = TracedStep(
            model,
            host,
            element_spec,
            mode.step,
            fused=fused,
            device=devices[0][0],
            known=_known(model, recent),
        )
    others = [step for step in recent if step is not function and step.serves(None, fused=False)]
    for step in others:
        step.earlier = []
    function.earlier = others[: MAX_STEPS - 1]
    setattr(model, mode.function, function)
    function.plans.trace_for(devices)
    host.extended.before_steps(function.variables)
    return function


def _recent_steps(model: keras.Model, mode: Mode) -> list[TracedStep]:
    """Return the steps of the model in a mode, the last used one first."""
    last = getattr(model, mode.function)  # `compile` clears it
    return [last, *last.earlier] if isinstance(last, TracedStep) else []


def _known(model: keras.Model, recent: Sequence[TracedStep]) -> TracedStep | None:
    """Return a traced step of the model: of the same mode if there is one; else of another.

    Among those of the same mode, one with fused variables comes first, since a new step uses them.
    """
    fused = [step for step in recent if step.plans.trace.plan.fused.all]
    of_modes = [step for mode in (TRAIN, TEST, PREDICT) for step in _recent_steps(model, mode)]
    return next(iter([*fused, *recent, *of_modes]), None)
