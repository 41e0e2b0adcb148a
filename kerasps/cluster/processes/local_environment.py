"""The environment of a task's process on this machine."""

from __future__ import annotations

import os

from kerasps.cluster.processes.gpus import visible_gpus, worker_gpus
from kerasps.cluster.processes.process import child_environment


def task_environment(task_type: str, task_index: int, num_workers: int) -> dict[str, str]:
    """Return the environment of the process of a task, without TF_CONFIG."""
    env = child_environment(os.environ)
    # Log errors only: else a server's warnings about this machine's processor fill the log.
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if task_type == "ps":
        # Variables are in the ps's main memory. A ps that saw the GPU would take GPU memory from
        # the workers.
        env["CUDA_VISIBLE_DEVICES"] = "-1"
        # oneDNN's allocator takes 3% of memory that tables without a vocabulary only reserve.
        env.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    else:
        # By default the first process on a GPU takes all of its memory; workers may share one.
        env.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        gpus = worker_gpus(num_workers, visible_gpus(os.environ))
        if gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpus[task_index]
    return env
