"""Finds the GPUs of this machine without TensorFlow, and splits them among workers."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Mapping
from pathlib import Path

_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
# `nvidia-smi` takes a second or two to wake an idle driver.
_NVIDIA_SMI_TIMEOUT_S = 10


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that CUDA would show to a process, as CUDA_VISIBLE_DEVICES names them.

    This does not call TensorFlow, with which this process would allocate memory on them.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA reads the list up to the first entry that is not a device: usually "-1" or the empty
        # string.
        return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))
    return [str(index) for index in range(_count_gpus())]


def worker_gpus(num_workers: int, gpus: list[str]) -> list[str] | None:
    """Return the CUDA_VISIBLE_DEVICES of each worker, None if there is nothing to split.

    Returns:
        One value per worker: neighbouring GPUs if there are enough for all, else one GPU, which
        several workers may share.
    """
    if len(gpus) < 2:
        return None
    if len(gpus) < num_workers:
        return [gpus[worker % len(gpus)] for worker in range(num_workers)]
    bounds = [worker * len(gpus) // num_workers for worker in range(num_workers + 1)]
    return [",".join(gpus[start:end]) for start, end in itertools.pairwise(bounds)]


def _count_gpus() -> int:
    # The driver's list costs nothing; containers often lack it but have `nvidia-smi`.
    if _NVIDIA_GPUS.is_dir():
        return len(list(_NVIDIA_GPUS.iterdir()))
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listing.splitlines())
