"""`SidecarEvaluatorModelExport`: saves the best model that a side-car evaluator has seen."""

from __future__ import annotations

import math
import os
import string
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

import keras

from kerasps import checks
from kerasps.errors import UnsupportedError

Mode = Literal["auto", "min", "max"]


class SidecarEvaluatorModelExport(keras.callbacks.Callback):
    """Saves the model after an evaluation that is better than all before it.

    Pass it only in the `callbacks` of a `kerasps.SidecarEvaluator`. The model is written under a
    temporary name and renamed when it is complete, so no reader sees half of it.

    ```python
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    best = kerasps.SidecarEvaluatorModelExport("best/model.keras", monitor="mae")
    data = np.ones((100, 64)), np.ones(100)
    kerasps.SidecarEvaluator(model, data, "checkpoints", callbacks=[best]).start()
    ```

    Args:
        export_filepath: the path of the file, ending in `.keras`, or in `.weights.h5` with
            `save_weights_only=True`. The file name may contain `{checkpoint}`, the name of the
            checkpoint without its ending, `{iterations}` and the names of metrics, such as
            `"best-{checkpoint}-{accuracy:.3f}.keras"`. Without them, each better model replaces the
            previous one.
        monitor: the name of the metric to compare, as `evaluate` reports it. Default `"loss"`.
        mode: `"min"`, `"max"` or `"auto"` (the default), which asks the metric.
        save_weights_only: save the weights only. Default False: save the model with its optimizer,
            for whose slots the evaluator then needs memory.
        initial_value_threshold: the first value to beat. Default None: the first evaluation is the
            best so far.

    Raises:
        ValueError: `export_filepath` has a field in its directory, or an unknown field.

    Follows `tf_keras.callbacks.SidecarEvaluatorModelExport` and `keras.callbacks.ModelCheckpoint`.
    """

    def __init__(
        self,
        export_filepath: str | os.PathLike[str],
        *,
        monitor: str = "loss",
        mode: Mode = "auto",
        save_weights_only: bool = False,
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__()
        path = checks.path(
            "export_filepath", export_filepath, advice="Give one like 'best/model.keras'."
        )
        checks.choice("mode", mode, get_args(Mode))
        _check_name(path, save_weights_only)
        self._directory, self._name, self._monitor = path.parent, path.name, monitor
        if "{" in str(self._directory):
            raise ValueError(
                "Only the file name of an export can contain fields. Expected: a directory "
                f"without braces. Received: export_filepath={str(path)!r}. Move the field into the "
                "file name."
            )
        fields = _fields(path)
        if fields & {"epoch", "batch"}:
            raise ValueError(
                "An evaluator does not know the epoch or the batch of a checkpoint. Expected: "
                "fields `{checkpoint}`, "
                f"`{{iterations}}` or names of metrics. Received: export_filepath={str(path)!r}. "
                "`{checkpoint}` is the name of the checkpoint, which may contain the epoch."
            )
        self._saver = keras.callbacks.ModelCheckpoint(
            path,
            monitor=monitor,
            mode=mode,
            save_best_only=True,
            save_weights_only=save_weights_only,
            initial_value_threshold=initial_value_threshold,
        )

    @property
    def directory(self) -> Path:
        """The directory into which models are exported."""
        return self._directory

    @property
    def save_weights_only(self) -> bool:
        """True if the weights are saved without the model and its optimizer."""
        return bool(self._saver.save_weights_only)

    @property
    def best(self) -> float | None:
        """The best value of the metric so far; at first the threshold, or None without one."""
        return None if self._saver.best is None else float(self._saver.best)

    def set_model(self, model: keras.Model) -> None:
        """Set the model to evaluate. The evaluator calls this."""
        super().set_model(model)
        self._saver.set_model(model)

    def on_train_begin(self, logs: object = None) -> None:
        """Refuse to be a callback of `fit`.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "SidecarEvaluatorModelExport saves after evaluations. Expected: a callback of a "
            "`kerasps.SidecarEvaluator`. Received: a call from `fit`. In `fit`, use "
            "`keras.callbacks.ModelCheckpoint`."
        )

    def export(
        self, checkpoint: str, iterations: int | None, metrics: Mapping[str, float]
    ) -> Path | None:
        """Save the model if `metrics` are the best so far. The evaluator calls this.

        Args:
            checkpoint: the name of the checkpoint, without its ending.
            iterations: the optimizer's iterations; None if they are not known.
            metrics: the value of the loss and of each metric, by name.

        Returns:
            The file that was written; None if the metrics are not the best.

        Raises:
            ValueError: the metric to monitor is not among them.
        """
        if self._monitor not in metrics:
            raise ValueError(
                "The evaluation does not report the metric to monitor. Expected: one of "
                f"{', '.join(map(repr, metrics))}. Received: "
                f"monitor={self._monitor!r}. Name one of these."
            )
        if math.isnan(metrics[self._monitor]):
            # For Keras no value is better than NaN, so a first NaN would stay the best for ever.
            return None
        self._directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=self._directory) as staging:
            self._saver.filepath = os.path.join(staging, self._name)
            self._saver.on_epoch_end(
                0, {**metrics, "checkpoint": checkpoint, "iterations": iterations}
            )
            written = next(Path(staging).iterdir(), None)
            return None if written is None else written.replace(self._directory / written.name)


def _check_name(path: Path, save_weights_only: bool) -> None:
    endings = (".weights.h5",) if save_weights_only else (".keras", ".h5")
    if path.name.endswith(endings):
        return
    raise ValueError(
        "The file name of an export has a wrong ending. Expected: one that ends in "
        f"`{endings[0]}`, with save_weights_only={save_weights_only!r}. Received: export_filepath="
        f"{str(path)!r}. Give it that ending."
    )


def _fields(path: Path) -> set[str]:
    """Return the names of the fields in braces of a file name."""
    try:
        parts = list(string.Formatter().parse(path.name))
    except ValueError as exc:
        raise ValueError(
            f"The braces in the file name of an export do not match: {exc}. Expected: fields such "
            f"as `{{checkpoint}}`. Received: export_filepath={str(path)!r}. Close each brace."
        ) from None
    if any(field == "" for _, field, _, _ in parts):
        raise ValueError(
            "A field in the file name of an export has no name. Expected: fields such as "
            f"`{{checkpoint}}`. Received: export_filepath={str(path)!r}. Name the field."
        )
    return {field for _, field, _, _ in parts if field}
