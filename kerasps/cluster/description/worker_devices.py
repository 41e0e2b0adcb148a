"""Finds the devices of workers, and chooses those that compute."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasps.runtime.devices import COORDINATOR_TASK

_LOGGER = logging.getLogger("kerasps")

# The device of a task for everything except the compute phase; also for that if there is no GPU.
FIRST_CPU = "CPU:0"


def checked_device_names(names: Any) -> tuple[str, ...] | None:
    """Return the short forms ("GPU:0") of the names that a user passed as `worker_devices`."""
    if names is None:
        return None
    expected = 'Expected: such as ["GPU:0", "GPU:1"].'
    received = f"Received: worker_devices={names!r}."
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"Argument `worker_devices` is not a list of names of devices. {expected} {received} "
            "Put the names into a list, or leave it out to use all GPUs of each worker."
        )
    short = [_short(name) for name in names]
    if not short or None in short or len(set(short)) < len(short):
        raise ValueError(
            "Argument `worker_devices` must have the names of devices of a worker, at least one "
            f"and each once. {expected} {received} Give each device as a type and a number, "
            "without a task: the names are the same for all workers. Leave it out to use all GPUs "
            "of each worker."
        )
    return tuple(name for name in short if name is not None)


def _short(name: str) -> str | None:
    """Return the short form of a device's name; None if it names no device, or includes a task."""
    try:
        spec = tf.DeviceSpec.from_string(name)
    except ValueError:
        return None
    if spec.device_type is None or spec.job is not None or spec.task is not None:
        return None
    return f"{spec.device_type}:{spec.device_index or 0}"


def compute_devices(names: Sequence[str], wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Return the devices of a worker that compute, one replica each: at least one.

    Returns:
        The chosen devices that the worker has. If the worker has none of them: its first GPU, else
        its first CPU. Without a choice: all of its GPUs, else its first CPU.
    """
    chosen = tuple(name for name in wanted or () if name in names)
    gpus = tuple(name for name in names if name.startswith("GPU:"))
    if wanted is not None and not chosen:
        gpus = gpus[:1]
    return chosen or gpus or (FIRST_CPU,)


class WorkerDevices:
    """Chooses the devices of the connected workers that compute."""

    def __init__(self, wanted: tuple[str, ...] | None) -> None:
        self._wanted = wanted
        self._warned: set[tuple[int, tuple[str, ...]]] = set()
        self._known: dict[int, tuple[str, ...]] = {}

    def check(self, addresses: Sequence[str]) -> None:
        """Check that every worker has the wanted devices.

        With its soft placement, TensorFlow would use other devices in place of missing ones.
        """
        for worker, address in enumerate(addresses):
            has = devices_of_task(f"/job:worker/replica:0/task:{worker}")
            missing = [name for name in self._wanted or () if name not in has]
            if missing:
                raise ValueError(
                    f"Argument `worker_devices` names devices that worker {worker} at {address} "
                    f"does not have. Expected: names among {', '.join(has)}. Received: "
                    f"worker_devices={list(self._wanted or ())!r}. Name devices that every worker "
                    "has; or leave it out, and each uses all its GPUs. A worker does not have a "
                    "GPU that CUDA hides from it (CUDA_VISIBLE_DEVICES) or does not find."
                )

    def of_all(self, num_workers: int) -> list[tuple[str, ...]]:
        """Return, for each worker, the short names of the devices that compute."""
        return [self.of(worker, num_workers) for worker in range(num_workers)]

    def of_calls(self, num_workers: int) -> tuple[str, bool]:
        """Return the device of scheduled functions, and whether all workers have it.

        All workers run the same function. A worker without that device runs it on the CPU.
        """
        first = [devices[0] for devices in self.of_all(num_workers)]
        device = next((name for name in first if name.startswith("GPU:")), first[0])
        return device, set(first) == {device}

    def of(self, worker: int, num_workers: int) -> tuple[str, ...]:
        """Return the short names of the devices that compute on a worker: at least one.

        For a worker that is not connected, return those that it had, or is expected to have.
        """
        if worker not in range(num_workers):
            raise ValueError(
                "Argument `worker` is not the index of a worker. Expected: 0 to "
                f"{num_workers - 1}. Received: worker={worker!r}. `strategy.workers()` lists them."
            )
        has = devices_of_task(f"/job:worker/replica:0/task:{worker}")
        if not has:
            return self._known.get(worker) or self._wanted or (FIRST_CPU,)
        found = self._known[worker] = compute_devices(has, self._wanted)
        is_complete = self._wanted is None or found == self._wanted
        if not is_complete and (worker, found) not in self._warned:
            self._warned.add((worker, found))
            _LOGGER.warning(
                f"Worker {worker} came without all of worker_devices={list(self._wanted or ())!r}: "
                f"it has {', '.join(has)}. It computes on {found[0]}."
            )
        return found


def devices_of_task(task: str) -> list[str]:
    """Return the short names of the devices of a connected task, as TensorFlow knows them."""
    # TensorFlow names the devices of the coordinator's job without a task.
    prefix = "/device:" if task == COORDINATOR_TASK else f"{task}/device:"
    names = [device.name for device in tf.config.list_logical_devices()]
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
