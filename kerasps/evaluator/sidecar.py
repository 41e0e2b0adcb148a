"""`SidecarEvaluator`: evaluates the checkpoints of a training that runs in other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import keras

from kerasps import _compat
from kerasps.checks import count, path, seconds
from kerasps.errors import CheckpointError
from kerasps.evaluator.arguments import check_exports, check_list
from kerasps.evaluator.best_model import SidecarEvaluatorModelExport
from kerasps.evaluator.training_end import TrainingEnd
from kerasps.evaluator.watched import (
    KERAS_SUFFIXES,
    WatchedCheckpoint,
    load_checkpoint,
    newest_checkpoint,
)
from kerasps.tools.monitoring.scalars import EventFile, write_scalar

# Short next to the time between two checkpoints, long next to reading a directory.
POLL_INTERVAL_S = 0.5
# An incomplete file changes until its writer is done. A file that has not changed for this long and
# cannot be read comes from a training that died, or from another model.
READ_LIMIT_S = 30.0
# Keras writes most checkpoints in less time, so an incomplete file is not reported before.
SAY_UNREADABLE_AFTER_S = 5.0
# After this long without a checkpoint, the directory may be the wrong one.
NOTICE_AFTER_S = 30.0


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one checkpoint.

    Args:
        checkpoint: the path of the checkpoint.
        iterations: the optimizer's iterations in it; None if it does not have them.
        metrics: the value of the loss and of each metric, by name.
    """

    checkpoint: str
    iterations: int | None
    metrics: Mapping[str, float]


class SidecarEvaluator:
    """Evaluates each new checkpoint in a directory, until the training is over.

    It runs in a separate process, so that the training does not wait for evaluations. It reads all
    checkpoints in a directory: those of `keras.callbacks.ModelCheckpoint` (`.weights.h5` and
    `.keras` files, under any names) and those of a `tf.train.CheckpointManager`. If several
    checkpoints are new since the last evaluation, only the newest is evaluated. A file that is
    being written is read when it is complete.

    It prints a line per evaluation. It ends when `max_evaluations` is reached, or after the last
    checkpoint when the training is over. `kerasps launch --evaluator` or a
    `kerasps.TrainingEndMarker` tells it of the training's end.

    ```python
    # The same model as in the training, but not under its strategy.
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
    model.compile(loss="mse", metrics=["mae"])
    evaluator = kerasps.SidecarEvaluator(
        model, (np.ones((100, 64)), np.ones(100)), "checkpoints", log_dir="logs"
    )
    evaluations = evaluator.start()
    ```

    Args:
        model: the model of the training, built and compiled with its metrics. It is a plain Keras
            model, or one under a strategy of this process, but not under that of the training.
        data: anything that `model.evaluate` takes as `x`, or a tuple `(x, y)` or `(x, y,
            sample_weight)`.
        checkpoint_dir: the directory to which the training writes checkpoints. It need not exist
            yet.
        steps: the number of batches of an evaluation. Default None: all.
        max_evaluations: the number of evaluations after which to stop. A checkpoint with this
            number in its name from TensorFlow (`ckpt-10`) is also the last, since others may have
            been skipped. Default None: no limit.
        callbacks: callbacks for `evaluate`, and `kerasps.SidecarEvaluatorModelExport`s.
        log_dir: the directory for TensorBoard. The loss and each metric are written to its
            subdirectory `validation` as `evaluation_<name>_vs_iterations`, as
            `keras.callbacks.TensorBoard` does, but without the package `tensorboard`. If a
            checkpoint has no iterations, the number of the evaluation is used. Default None:
            nothing is written.

    Raises:
        UnsupportedError: the backend of Keras is not TensorFlow.
        TypeError: an argument is not of its type.
        ValueError: the model is not built or compiled, or an argument is out of its range.

    Follows `tf_keras.utils.SidecarEvaluator`.
    """

    def __init__(
        self,
        model: keras.Model,
        data: object,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        *,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        _compat.check_backend()
        _check_model(model)
        if callbacks is not None:
            check_list("callbacks", callbacks, keras.callbacks.Callback)
        if log_dir is not None:
            path("log_dir", log_dir, advice="Leave it out to write nothing.")
        steps = _count_or_none("steps", steps)
        max_evaluations = _count_or_none("max_evaluations", max_evaluations)
        self._model = model
        self._data = (
            dict(zip(("x", "y", "sample_weight"), data, strict=False))
            if isinstance(data, tuple)
            else {"x": data}
        )
        self._directory = path("checkpoint_dir", checkpoint_dir)
        self._steps = steps
        self._max_evaluations = max_evaluations
        self._exports = [
            callback
            for callback in callbacks or ()
            if isinstance(callback, SidecarEvaluatorModelExport)
        ]
        check_exports(self._exports, self._directory)
        others = [callback for callback in callbacks or () if callback not in self._exports]
        # One list for all evaluations. With a new one for each, a callback would open a new file of
        # events each time.
        self._callbacks = keras.callbacks.CallbackList(others, model=model)
        for export in self._exports:
            export.set_model(model)
        if any(not export.save_weights_only for export in self._exports):
            _build_optimizer(model)
        self._file = (
            None
            if log_dir is None
            else EventFile(os.path.join(log_dir, "validation"), "SidecarEvaluator")
        )

    def start(self, timeout: float | None = None) -> list[Evaluation]:
        """Evaluate checkpoints as they come, until the training is over.

        Args:
            timeout: the seconds to wait for a new checkpoint before it ends. Default None: for
                ever.

        Returns:
            The evaluations, in their order.

        Raises:
            CheckpointError: the newest checkpoint cannot be read and has not changed for 30
                seconds.
        """
        timeout = _checked_timeout(timeout)
        end = TrainingEnd(self._directory)
        reader = _Reader(self._model)
        evaluations: list[Evaluation] = []
        last: WatchedCheckpoint | None = None
        waiting_since, was_noticed = time.monotonic(), False
        while True:
            # Checked before the directory is read, so that a checkpoint that was written just
            # before the end is found.
            is_over = end.has_come()
            newest = newest_checkpoint(self._directory)
            waited = time.monotonic() - waiting_since
            is_new = newest is not None and newest.is_newer_than(last)
            if newest is not None and is_new:
                if reader.read(newest):
                    evaluations.append(
                        self._evaluate(newest, reader.iterations, len(evaluations) + 1)
                    )
                    last, waiting_since = newest, time.monotonic()
                    if self._is_last(newest, len(evaluations)):
                        _say(f"max_evaluations={self._max_evaluations} is reached")
                        return evaluations
                    continue
            elif is_over:
                _say(
                    "the training is over"
                    if evaluations
                    else f"the training is over, without a checkpoint in {self._directory}"
                )
                return evaluations
            elif timeout is not None and waited > timeout:
                _say(f"no new checkpoint in {self._directory} for {timeout:g} s")
                return evaluations
            elif last is None and not was_noticed and waited > NOTICE_AFTER_S:
                was_noticed = True
                kinds = ", ".join(f"*{suffix}" for suffix in KERAS_SUFFIXES)
                _say(
                    f"still waiting for {kinds} or what a tf.train.CheckpointManager writes, in "
                    f"{self._directory}"
                )
            time.sleep(POLL_INTERVAL_S)

    def _evaluate(
        self, checkpoint: WatchedCheckpoint, iterations: int | None, number: int
    ) -> Evaluation:
        logs = self._model.evaluate(
            **self._data, steps=self._steps, callbacks=self._callbacks, verbose=0, return_dict=True
        )
        metrics = {name: float(value) for name, value in logs.items()}
        step = "" if iterations is None else f" at iteration {iterations}"
        values = ", ".join(f"{name} {value:.5g}" for name, value in metrics.items())
        _say(f"{checkpoint.path.name}{step}: {values}")
        if self._file is not None:
            place = number if iterations is None else iterations
            self._file.write(lambda: _write_scalars(metrics, place))
        # Not in `on_test_end`, where a callback does not know the checkpoint, and workers may still
        # be busy.
        for export in self._exports:
            written = export.export(checkpoint.name, iterations, metrics)
            if written is not None:
                _say(f"the best so far, exported to {written}")
        return Evaluation(str(checkpoint.path), iterations, metrics)

    def _is_last(self, checkpoint: WatchedCheckpoint, num_evaluations: int) -> bool:
        return (
            self._max_evaluations is not None
            and max(num_evaluations, checkpoint.number or 0) >= self._max_evaluations
        )

    def __repr__(self) -> str:
        return (
            f"<SidecarEvaluator checkpoint_dir={str(self._directory)!r} "
            f"max_evaluations={self._max_evaluations}>"
        )


class _Reader:
    """Reads checkpoints that may not be complete yet."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._failed: WatchedCheckpoint | None = None
        self._failed_since = self._path_failed_since = 0.0
        self._is_said = False
        self.iterations: int | None = None

    def read(self, checkpoint: WatchedCheckpoint) -> bool:
        """Read a checkpoint into the model, and set `iterations`.

        Returns:
            False if it cannot be read yet.
        """
        try:
            self.iterations = load_checkpoint(self._model, checkpoint)
        # An incomplete file can cause any error in a reader.
        except Exception as exc:
            now = time.monotonic()
            if self._failed is None or self._failed.path != checkpoint.path:
                self._path_failed_since, self._is_said = now, False
            if not self._is_said and now - self._path_failed_since > SAY_UNREADABLE_AFTER_S:
                self._is_said = True
                _say(
                    f"{checkpoint.path.name} cannot be read yet, trying again: "
                    f"{type(exc).__name__}: {exc}"
                )
            if self._failed != checkpoint:
                self._failed, self._failed_since = checkpoint, now
            if now - self._failed_since > READ_LIMIT_S:
                raise CheckpointError(
                    "The newest checkpoint cannot be read, and has not changed for "
                    f"{READ_LIMIT_S:g} s: {exc}. Expected: a complete checkpoint of the "
                    f"evaluator's model. Received: {checkpoint.path}. Make the model the same as "
                    "in the training; if a training died while it wrote the file, remove it "
                    "and start the evaluator again."
                ) from exc
            return False
        self._failed = None
        return True


def _write_scalars(metrics: Mapping[str, float], step: int) -> None:
    for name, value in metrics.items():
        write_scalar(f"evaluation_{name}_vs_iterations", value, step)


def _build_optimizer(model: keras.Model) -> None:
    """Make the optimizer's slots, to load those of a checkpoint and save them with the model."""
    if model.optimizer is not None and not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)


def _check_model(model: object) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            "Argument `model` is not a model. Expected: a `keras.Model`. Received: "
            f"model={model!r}. Give a model."
        )
    for state, fix in (
        ("built", "Call `model.build(input_shape)`"),
        ("compiled", "Call `model.compile(loss=..., metrics=...)`"),
    ):
        if not getattr(model, state):
            raise ValueError(
                f"The model is not {state}. Expected: a model that is built and compiled, with the "
                f"metrics to evaluate. Received: model={model!r}. {fix} before."
            )


def _count_or_none(argument: str, value: object) -> int | None:
    if value is None:
        return None
    return count(
        f"Argument `{argument}` is not a count",
        value,
        expected="a whole number of at least 1, or None",
        received=f"{argument}={value!r}",
        advice="Give a number like 10.",
    )


def _checked_timeout(timeout: float | None) -> float | None:
    """Check and return the seconds to wait for a checkpoint: None for ever, or 0 or more."""
    if timeout is None or timeout == 0:
        return timeout
    return seconds(
        "Argument `timeout` is not a time",
        timeout,
        received=f"timeout={timeout!r}",
        advice="Leave it out to wait for ever.",
    )


def _say(text: str) -> None:
    print(f"SidecarEvaluator: {text}", flush=True)
