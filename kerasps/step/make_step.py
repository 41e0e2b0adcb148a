"""Makes the step of a model for an input, or finds the one that was made before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from kerasps.errors import InputError, KeraspsError
from kerasps.inputs import Input
from kerasps.step.mode import PREDICT, TEST, TRAIN, Mode
from kerasps.step.traced_step import TracedStep


def step_for(model: keras.Model, mode: Mode, inputs: Input) -> TracedStep:
    """Return the model's step for batches of `inputs`, on the devices of all workers.

    Raises InputError where the model can take no such batches, and it is plain why.
    """
    devices = model._distribute_strategy._devices_of_workers()
    try:
        return step_function(model, mode, inputs.element_spec, devices)
    except (TypeError, ValueError) as exc:
        text = None if isinstance(exc, KeraspsError) else _what_is_wrong(model, mode, inputs)
        if text is None:
            raise
        raise InputError(f"{text} The model's error: {exc}") from exc


def _what_is_wrong(model: keras.Model, mode: Mode, inputs: Input) -> str | None:
    """Return what may be wrong with the batches of a step that could not be traced, if known."""
    if inputs.differences is not None:
        return (
            "The model takes no batches that are of different shapes on different workers. "
            f"Received: {inputs.differences}. Make `dataset_fn` return the same on each worker."
        )
    _, y, _ = keras.utils.unpack_x_y_sample_weight(inputs.element_spec)
    if y is None and mode is not PREDICT and model._compile_loss is not None:
        return (
            "The model was compiled with a loss, which compares its outputs with y. Expected: y, "
            "or a dataset of (x, y). Received: x alone. Give y, or compile without a loss where "
            "the model adds its own (`add_loss`)."
        )
    return None


def step_function(
    model: keras.Model,
    mode: Mode,
    element_spec: Any,
    devices: Sequence[Sequence[str]],
    *,
    fused: bool = True,
) -> TracedStep:
    """Return the model's step for batches of `element_spec`: a new one where none serves.

    Its trace builds what is still to be built, as Keras's does.

    Args:
        model: the model.
        mode: what to do with it.
        element_spec: the `tf.TypeSpec` structure of a batch.
        devices: the devices that compute, of each task that does such steps.
        fused: see `TracedStep`.
    """
    strategy = model._distribute_strategy
    fused = fused and strategy.extended.may_fuse
    function = getattr(model, mode.function)  # `compile` clears it
    if not isinstance(function, TracedStep) or not function.serves(element_spec, fused=fused):
        function = TracedStep(
            model,
            strategy,
            element_spec,
            mode.step,
            fused=fused,
            device=devices[0][0],
            known=_known(model, function),
        )
        setattr(model, mode.function, function)
    function.plans.trace_for(devices)
    strategy.extended.before_steps(function.variables)
    return function


def _known(model: keras.Model, before: Any) -> TracedStep | None:
    """Return a step of the model that was traced: `before`, for the same mode, if that is one."""
    of_modes = (getattr(model, mode.function) for mode in (TRAIN, TEST, PREDICT))
    return next((own for own in (before, *of_modes) if isinstance(own, TracedStep)), None)
