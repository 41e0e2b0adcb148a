"""The exceptions that kerasps raises.

    KeraspsError
    ├── ClusterConfigError     (ValueError)       TF_CONFIG or a cluster's description is wrong
    ├── ClusterClosedError     (ValueError)       a closed cluster, or an object on it, was used
    ├── TaskUnreachableError   (ConnectionError)  a task did not answer within the time limit
    ├── TaskStartError         (RuntimeError)     a task's process ended before it was ready
    ├── TaskLostError          (RuntimeError)     a task was lost while it was in use
    │   ├── PSLostError
    │   └── WorkerLostError
    ├── CheckpointError        (RuntimeError)     an evaluator cannot read a checkpoint
    ├── DeltaError             (RuntimeError)     a file of a chain of deltas cannot be used
    ├── InputError             (ValueError)       a method of a model got input it cannot use
    ├── MissingNameError       (ImportError)      Keras or TensorFlow lacks a name that it needs
    └── UnsupportedError       (ValueError)       a feature that cannot work with parameter servers

Each is also a built-in exception, so code that knows nothing of kerasps can catch it.
"""

from __future__ import annotations


class KeraspsError(Exception):
    """Base of every exception that kerasps raises on purpose."""

    # AutoGraph passes such an error on unchanged. It replaces others that a converted function
    # raises.
    ag_pass_through = True


class ClusterConfigError(KeraspsError, ValueError):
    """TF_CONFIG, or a cluster described in another way, is wrong."""


class ClusterClosedError(KeraspsError, ValueError):
    """A cluster, or a model, variable or strategy of it, was used after the cluster was closed."""


class TaskUnreachableError(KeraspsError, ConnectionError):
    """A task of the cluster did not accept a connection within the time limit."""


class _TaskError(KeraspsError, RuntimeError):
    """An error about one task.

    Args:
        message: the text of the error. Default: empty.
        task_type: `"worker"` or `"ps"`, if one task is known to be the cause. Default None.
        task_index: the index of that task in its job. Default None.
    """

    def __init__(
        self, message: str = "", *, task_type: str | None = None, task_index: int | None = None
    ) -> None:
        super().__init__(message)
        self.task_type = task_type
        self.task_index = task_index


class TaskStartError(_TaskError):
    """A task was not ready in time.

    Its process ended or did not answer, or the chief's port is in use.
    """


class TaskLostError(_TaskError):
    """A task was lost while it was in use."""


class PSLostError(TaskLostError):
    """A ps was lost, and with it the variables that it held."""


class WorkerLostError(TaskLostError):
    """A worker was lost and none is left, or none came back in time."""


class CheckpointError(KeraspsError, RuntimeError):
    """A side-car evaluator cannot read the newest checkpoint."""


class DeltaError(KeraspsError, RuntimeError):
    """A file of a chain of deltas is missing, damaged, or of another chain or model."""


class InputError(KeraspsError, ValueError):
    """`fit`, `evaluate` or `predict` got input that cannot be used."""


class MissingNameError(KeraspsError, ImportError):
    """A feature needs a name that this version of Keras or TensorFlow no longer has."""


class UnsupportedError(KeraspsError, ValueError):
    """A feature of Keras that cannot work with parameter servers."""


for _public in (
    KeraspsError,
    ClusterConfigError,
    ClusterClosedError,
    TaskUnreachableError,
    TaskStartError,
    TaskLostError,
    PSLostError,
    WorkerLostError,
    CheckpointError,
    DeltaError,
    InputError,
    MissingNameError,
    UnsupportedError,
):
    _public.__module__ = "kerasps"
