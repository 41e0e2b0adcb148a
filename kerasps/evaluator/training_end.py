"""Signals to an evaluator that the training is over: a file, or the end of its stdin."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

import keras

from kerasps.checks import path
from kerasps.evaluator.process import END_OF_TRAINING_ON_STDIN

MARKER = "training_ended"
# A marker that exists when an evaluator starts may come from an earlier training; the next training
# removes it. The evaluator trusts it after this time, in which a cluster starts and connects.
OLD_MARKER_GRACE_S = 60.0


class TrainingEndMarker(keras.callbacks.Callback):
    """Tells a `kerasps.SidecarEvaluator` that `fit` has ended, by a file among the checkpoints.

    The file, `training_ended`, is removed when `fit` begins and written when `fit` ends. A `fit`
    that ends in an error writes none, and an evaluator waits for the training to resume.
    `kerasps launch --evaluator` does not need this callback.

    ```python
    save = keras.callbacks.ModelCheckpoint(
        "checkpoints/epoch-{epoch:03d}.weights.h5", save_weights_only=True
    )
    end = kerasps.TrainingEndMarker("checkpoints")
    # `model` was made under a `ParameterServerStrategy`.
    model.fit(np.ones((1000, 64)), np.ones(1000), epochs=3, callbacks=[save, end])
    ```

    Args:
        checkpoint_dir: the directory of the checkpoints; made if it is missing.
    """

    def __init__(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self._directory = path("checkpoint_dir", checkpoint_dir)

    def on_train_begin(self, logs: object = None) -> None:
        """Remove the file of an earlier training."""
        marker = self._directory / MARKER
        # A file of this name that is not empty is another's.
        if marker.is_file() and not marker.stat().st_size:
            marker.unlink()

    def on_train_end(self, logs: object = None) -> None:
        """Write the file."""
        self._directory.mkdir(parents=True, exist_ok=True)
        (self._directory / MARKER).touch()


class TrainingEnd:
    """Detects the end of the training, for an evaluator."""

    def __init__(self, checkpoint_dir: Path) -> None:
        self._marker = checkpoint_dir / MARKER
        self._is_launched = os.environ.get(END_OF_TRAINING_ON_STDIN) == "1"
        self._old = self._modified_ns()
        self._started = time.monotonic()

    def has_come(self) -> bool:
        """Return whether the training has ended, so that there will be no more checkpoints."""
        if self._is_launched:
            # Trust only the launcher, since a marker may come from an earlier training.
            return _stdin_has_ended()
        found = self._modified_ns()
        if found is None:
            return False
        return found != self._old or time.monotonic() - self._started > OLD_MARKER_GRACE_S

    def _modified_ns(self) -> int | None:
        try:
            return self._marker.stat().st_mtime_ns
        except FileNotFoundError:
            return None


def _stdin_has_ended() -> bool:
    # Nothing is ever written to it, so it becomes readable only at its end.
    readable, _, _ = select.select([0], [], [], 0)
    return bool(readable) and os.read(0, 1) == b""
