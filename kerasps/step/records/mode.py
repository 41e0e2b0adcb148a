"""The differences between `fit`, `evaluate` and `predict`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """The properties in which `fit`, `evaluate` and `predict` differ."""

    name: str  # the word in the names of callbacks: `on_<name>_batch_end`
    step: str  # the method of the model that the step calls
    # The attribute of the model that keeps the traced step; Keras clears it when it must be traced
    # anew.
    function: str
    stop: str  # the attribute of the model that a callback sets to end the loop


TRAIN = Mode("train", "train_step", "train_function", "stop_training")
TEST = Mode("test", "test_step", "test_function", "stop_evaluating")
PREDICT = Mode("predict", "predict_step", "predict_function", "stop_predicting")
