"""Serves an updatable SavedModel, and applies the deltas of a training to it."""

from __future__ import annotations

import json
import os
import threading
import time
import types
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from kerasps import checks
from kerasps.errors import DeltaError, InputError
from kerasps.serving.deltas import Delta
from kerasps.serving.reader import DeltaReader

# The file of an updatable SavedModel that names the inputs of its signature `apply_delta`.
_INPUTS_FILE = "assets.extra/kerasps_deltas.json"


class Follower:
    """Answers from a SavedModel that follows a training: no cluster, nothing of the training.

    It looks into the directory of a `kerasps.DeltaExport` again and again, and applies what is new.
    An answer is of one version: a request that runs while a delta is applied sees all of it or
    none, and does not wait for it. After a wrong file it keeps the last good state.

    ```python
    with kerasps.serving.Follower("exported", "deltas") as follower:
        print(follower(np.ones((2, 64), "float32")), follower.version, follower.age_s)
    ```

    Args:
        saved_model: the directory of `model.export(saved_model, updatable=True)`.
        directory: that of the `DeltaExport`. It need not exist yet.
        every_seconds: the seconds between two looks into the directory. Default 0.2.

    Raises:
        InputError: the SavedModel was exported without `updatable=True`.
        ImportError: the package `safetensors` is not installed.
    """

    def __init__(
        self,
        saved_model: str | os.PathLike[str],
        directory: str | os.PathLike[str],
        *,
        every_seconds: float = 0.2,
    ) -> None:
        path = checks.path("saved_model", saved_model, advice="Give one like 'exported'.")
        self._every = checks.seconds(
            "Argument `every_seconds` is not a time",
            every_seconds,
            received=f"every_seconds={every_seconds!r}",
            advice="Give a number like 0.2.",
        )
        self._reader = DeltaReader(directory)
        try:
            self._inputs = json.loads((path / _INPUTS_FILE).read_text())
        except FileNotFoundError:
            raise InputError(
                f"The SavedModel {path} cannot follow a training. Expected: one of "
                "`model.export(path, updatable=True)`. Received: a directory without "
                f"{_INPUTS_FILE}. Export the model anew."
            ) from None
        self._model = tf.saved_model.load(os.fspath(path))
        self._apply_delta = self._model.signatures["apply_delta"]
        self._specs: dict[str, tf.TensorSpec] = self._apply_delta.structured_input_signature[1]
        (self._signature, _), *_ = (
            function.structured_input_signature for function in self._model.serve.concrete_functions
        )
        self._lock = threading.Lock()
        self._version: int | None = None
        self._read_at: float | None = None
        self._problem: str | None = None
        self._is_closed = threading.Event()
        self.update()
        self._thread = threading.Thread(target=self._watch, name="kerasps-follower", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int | None:
        """The version of the last delta; None before the first one."""
        return self._version

    @property
    def age_s(self) -> float | None:
        """The seconds since the last delta was read from the training; None before the first."""
        return None if self._read_at is None else time.time() - self._read_at

    @property
    def problem(self) -> str | None:
        """Why the last look into the directory failed; None if it did not."""
        return self._problem

    def __call__(self, *inputs: object) -> Any:
        """Return the outputs of the model as tensors, given its inputs as arrays or tensors.

        Thread: any, several at the same time.
        """
        tensors = tf.nest.map_structure(
            lambda spec, value: tf.convert_to_tensor(value, spec.dtype),
            self._signature,
            tuple(inputs),
        )
        return self._model.serve(*tensors)

    def predict(self, *inputs: object) -> Any:
        """Return the same as a call, as NumPy arrays."""
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), self(*inputs))

    def update(self) -> int:
        """Apply what is new now; return how many deltas. A thread does so again and again.

        Warns once of each problem.
        """
        applied = 0
        with self._lock:
            try:
                for delta in self._reader.new():
                    self._apply(delta)
                    self._version, self._read_at = delta.version, delta.read_at
                    applied += 1
            except (DeltaError, OSError, tf.errors.OpError) as exc:
                self._note(str(exc))
            else:
                self._problem = None
        return applied

    def close(self) -> None:
        """Follow no longer. The follower still answers."""
        self._is_closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.close()

    def _watch(self) -> None:
        while not self._is_closed.wait(self._every):
            self.update()

    def _note(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            warnings.warn(
                f"A follower keeps version {self._version}. {problem}", UserWarning, stacklevel=3
            )

    def _apply(self, delta: Delta) -> None:
        tables, rows, weights = (self._inputs[kind] for kind in ("tables", "rows", "weights"))
        values: dict[str, Any] = {"version": delta.version, "is_base": delta.is_base}
        for path, name in tables.items():
            change = delta.tables.get(path)
            values[f"{name}_is_whole"] = change is not None and change.is_whole
            for part in ("ids", "rows", "removed"):
                if change is not None:
                    values[f"{name}_{part}"] = getattr(change, part)
        for path, name in rows.items():
            if path in delta.tables:
                values[f"{name}_ids"] = delta.tables[path].ids
                values[f"{name}_rows"] = delta.tables[path].rows
            elif path in delta.weights:  # a small one is written whole
                values[f"{name}_ids"] = np.arange(len(delta.weights[path]))
                values[f"{name}_rows"] = delta.weights[path]
        for path, name in weights.items():
            values[f"{name}_is_given"] = path in delta.weights
            if path in delta.weights:
                values[name] = delta.weights[path]
        given, known = {*delta.tables, *delta.weights}, {*tables, *rows, *weights}
        if given - known or (delta.is_base and known - given):
            wrong = sorted(given ^ known if delta.is_base else given - known)
            raise self._foreign(delta, ", ".join(wrong))
        tensors = {}
        for name, spec in self._specs.items():
            # An input that the delta does not have has no rows, or is not read.
            empty = np.zeros([size or 0 for size in spec.shape])
            value = np.asarray(values.get(name, empty)).astype(spec.dtype.as_numpy_dtype)
            if not spec.shape.is_compatible_with(value.shape):
                raise self._foreign(delta, f"{name} of shape {value.shape}")
            tensors[name] = tf.constant(value)
        self._apply_delta(**tensors)

    def _foreign(self, delta: Delta, received: str) -> DeltaError:
        return DeltaError(
            f"The delta {delta.name} is of another model. Expected: the tables and weights of the "
            f"SavedModel. Received: {received}. Export the model anew, or give the directory of "
            "its deltas."
        )
