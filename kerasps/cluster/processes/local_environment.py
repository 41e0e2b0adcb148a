"""The environment of a task's process on this machine."""

from __future__ import annotations

import os

from kerasps.cluster.processes.gpus import visible_gpus, worker_gpus
from kerasps.cluster.processes.process import child_environment


def task_environment(task_type: str, task_index: int, num_workers: int) -> dict[str, str]:
    """Return the environment of the process of a task, but for TF_CONFIG.

    Args:
        task_type: `"worker"` or `"ps"`.
        task_index: the index of the task in its job.
        num_workers: how many workers share the GPUs of this machine.
    """
    env = child_environment(os.environ)
    # Errors only: a server's warnings about this machine's processor fill the log otherwise.
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if task_type == "ps":
        # Variables live in the ps's main memory. A ps that saw the GPU would take memory there
        # from the workers.
        env["CUDA_VISIBLE_DEVICES"] = "-1"
    else:
        # TensorFlow's first user of a GPU takes all of its memory; workers may share one.
        env.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        gpus = worker_gpus(num_workers, visible_gpus(os.environ))
        if gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpus[task_index]
    return env
