"""`CentralStorageStrategy`: one machine, variables on one of its devices, replicas on several."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike

from kerasps import _compat
from kerasps._private_names import CENTRAL
from kerasps.errors import UnsupportedError
from kerasps.variables.keras.xla import graph_for_xla


class CentralStorageStrategy(tf.distribute.Strategy):
    """Train on all devices of one machine, with the variables on a single one of them.

    Each step takes one batch, and each compute device gets a part of it. All devices read the same
    variables. The strategy sums their gradients, and the optimizer updates each variable once, on
    the variable's device, beside its slots. So a model and its slots may be larger than the memory
    of a GPU, and the replicas hold no copies of them. It needs no cluster and starts none:
    `model.fit` is Keras's.

    Weights and metrics equal those of `tf.distribute.MirroredStrategy` on the same compute devices.
    As there, each replica keeps separate values of what it changes without the others: the states
    of metrics, and weights made with `trainable=False` and no `aggregation`, such as moving
    averages of batch normalisation and the seeds of dropout.

    ```python
    strategy = kerasps.CentralStorageStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(np.ones((1000, 64)), np.ones(1000), batch_size=100)
    ```

    Args:
        compute_devices: names of the devices of this process that compute, one replica each, such
            as `["GPU:0", "GPU:1"]`. Default: all GPUs, or the first CPU if there is no GPU.
        parameter_device: the name of the device that holds the variables. Default: the compute
            device if there is only one, else `"CPU:0"`.

    Raises:
        TypeError: `compute_devices` is not a list of names, or `parameter_device` is not a name.
        ValueError: a device does not exist in this process or is named twice, or the list is empty.
        UnsupportedError: the backend of Keras is not TensorFlow.
        ImportError: a private name of Keras or TensorFlow is missing in the versions installed.

    Warns:
        UserWarning: this version of Keras or TensorFlow was not tested.

    Follows `tf.distribute.experimental.CentralStorageStrategy`.
    """

    # TensorFlow's mirrored strategy reads it. Only TensorFlow's tests change it.
    _collective_key_base = 0

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
    ) -> None:
        _compat.check_backend()
        known = _devices_of_process()
        if compute_devices is None:
            gpus = [device for device in known if _type_of(device) == "GPU"]
            compute = gpus or [_FIRST_CPU]
        else:
            compute = _checked_compute_devices(compute_devices, known)
        if parameter_device is not None:
            parameter = _checked_device("parameter_device", parameter_device, known)
        else:
            parameter = compute[0] if len(compute) == 1 else _FIRST_CPU
        _compat.check_offered(CENTRAL)
        _compat.warn_of_untested_versions()
        super().__init__(CentralStorageExtended(self, compute, parameter))

    @property
    def compute_devices(self) -> tuple[str, ...]:
        """The full names of the devices that compute, one replica each."""
        return tuple(self.extended.worker_devices)

    @property
    def parameter_device(self) -> str:
        """The full name of the device that holds the variables."""
        return str(self.extended.parameter_devices[0])

    def __repr__(self) -> str:
        compute = ", ".join(_short(device) for device in self.compute_devices)
        return (
            f"<CentralStorageStrategy compute_devices=[{compute}] "
            f"parameter_device={_short(self.parameter_device)}>"
        )


class _Convertible:
    """A variable of several values that converts to Python's numbers and NumPy's arrays.

    TensorFlow's distributed variables lack these conversions of a `tf.Variable`. `__bool__` stays
    TensorFlow's, which uses it to test if there is a variable.
    """

    numpy: Callable[[], Any]

    def __int__(self) -> int:
        return int(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        del copy  # it is one
        return np.asarray(self.numpy(), dtype)


class ReplicatedVariable(_Convertible, _compat.MirroredVariable):
    """TensorFlow's variable with a value per replica."""


class AggregatedVariable(_Convertible, _compat.SyncOnReadVariable):
    """TensorFlow's variable with a value per replica, which reads as their sum or mean."""


class CentralVariable(_Convertible, _compat.MirroredVariable):
    """A variable with one value on the parameter device, which all replicas read.

    TensorFlow's mirrored variable has a list of values, one per replica. Here the list has one.
    """

    def _get_replica(self, replica_id: int) -> Any:
        return self.values[0]

    @property
    def handle(self) -> Any:
        """The handle of the only value."""
        return self.values[0].handle

    def _update_replica(
        self, update_fn: Callable[..., object], value: tf.Tensor, **kwargs: object
    ) -> Any:
        strategy = self.distribute_strategy
        if self.aggregation != tf.VariableAggregation.NONE or strategy.num_replicas_in_sync == 1:
            return super()._update_replica(update_fn, value, **kwargs)

        # In TensorFlow each replica would update its mirrored value, and the first replica's value
        # is saved. All replicas wait here, so none reads the new value too early.
        def update(strategy: tf.distribute.Strategy, value: tf.Tensor) -> Any:
            first = strategy.experimental_local_results(value)[0]
            return self._update_cross_replica(update_fn, first, **kwargs)

        try:
            return tf.distribute.get_replica_context().merge_call(update, args=(value,))
        except RuntimeError as exc:  # TensorFlow's, of a graph within the replica's
            raise UnsupportedError(
                f"The variable {self.name!r} is assigned in a `tf.cond`, a `tf.while_loop` or a "
                "`tf.function` within a replica of a CentralStorageStrategy. Expected: a variable "
                "that all replicas share is assigned where all replicas meet. Received: one with "
                "trainable=True and no aggregation. Assign it outside of the control flow, or make "
                "it with `trainable=False`, so that each replica has a separate value."
            ) from exc


_CONVERTIBLE: dict[type, type] = {
    _compat.MirroredVariable: ReplicatedVariable,
    _compat.SyncOnReadVariable: AggregatedVariable,
}


class CentralStorageExtended(_compat.MirroredExtended):
    """Puts variables on the parameter device, and otherwise is TensorFlow's mirrored strategy.

    Methods with an underscore override TensorFlow's; `_compat.check_offered` checks that they
    exist there.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, compute_devices: list[str], parameter_device: str
    ) -> None:
        # The first compute device sums the gradients, and only the sum goes to the parameter
        # device. With all-reduce every device would compute a sum that only one of them needs.
        super().__init__(strategy, compute_devices, tf.distribute.ReductionToOneDevice())
        self._strategy = weakref.ref(strategy)
        self._parameter_device = parameter_device

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device that holds the variables."""
        return (self._parameter_device,)

    def _create_variable(self, next_creator: Callable[..., object], **kwargs: Any) -> Any:
        if not _is_central(**kwargs):
            variable = super()._create_variable(next_creator, **kwargs)
            # TensorFlow chooses the class.
            variable.__class__ = _CONVERTIBLE.get(type(variable), type(variable))
            return variable
        kwargs.pop("colocate_with", None)

        def create(**kwargs: object) -> list[Any]:
            with tf.device(self._parameter_device):
                return [next_creator(**kwargs)]

        return _compat.create_mirrored_variable(
            self._strategy(),
            create,
            {tf.VariableSynchronization.ON_WRITE: CentralVariable},
            {},
            **kwargs,
        )

    def _use_merge_call(self) -> bool:
        # Without it, each replica would update a variable that they share.
        return len(self._devices) > 1 or bool(super()._use_merge_call())

    def _call_for_each_replica(
        self, fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> Any:
        devices = {*self._devices, self._parameter_device}
        is_compiled = getattr(fn, "_jit_compile", False) or graph_for_xla() is not None
        if is_compiled and len(devices) > 1:
            raise UnsupportedError(
                "XLA compiles a step for one device, and the steps of this CentralStorageStrategy "
                "use several. Expected: jit_compile=False, or one device that computes and holds "
                "the variables. Received: jit_compile=True with "
                f"{', '.join(sorted(_short(device) for device in devices))}. Give "
                '`jit_compile=False` or "auto" to `compile`, or to `tf.function`.'
            )
        return super()._call_for_each_replica(fn, args, kwargs)


def _is_central(
    *,
    synchronization: tf.VariableSynchronization = tf.VariableSynchronization.AUTO,
    aggregation: tf.VariableAggregation = tf.VariableAggregation.NONE,
    trainable: bool | None = None,
    colocate_with: object = None,
    **others: object,
) -> bool:
    """Return True if all replicas share a new variable; the arguments are those of its creator.

    A slot is on its variable's device. A metric's state belongs to a replica. So do variables that
    no gradient changes and that are not aggregated: seeds, moving averages, the state of a
    recurrent layer.
    """
    if synchronization == tf.VariableSynchronization.ON_READ:
        return False
    if colocate_with is not None:
        return isinstance(colocate_with, CentralVariable)
    return trainable is not False or aggregation != tf.VariableAggregation.NONE


_PROCESS = "/job:localhost/replica:0/task:0"
_FIRST_CPU = f"{_PROCESS}/device:CPU:0"


def _devices_of_process() -> list[str]:
    """Return the full names of the devices of this process, without those of a cluster's tasks."""
    names = [_full_name(device.name) for device in tf.config.list_logical_devices()]
    return [name for name in names if name.startswith(_PROCESS)]


def _full_name(name: str) -> str:
    """Return the full name of a device, given any name that TensorFlow takes.

    Raises:
        ValueError: it is no name of a device.
    """
    given = tf.DeviceSpec.from_string(name)
    if given.device_type is None:
        raise ValueError("it names no type of device")
    default = tf.DeviceSpec.from_string(_PROCESS).replace(device_index=0)
    return str(default.make_merged_spec(given).to_string())


def _type_of(device: str) -> str:
    return str(tf.DeviceSpec.from_string(device).device_type)


def _short(device: str) -> str:
    return device.rpartition("device:")[2]


def _checked_device(argument: str, name: object, known: list[str]) -> str:
    """Return the full name of a device that exists.

    With soft placement, TensorFlow would replace a missing device by another one.
    """
    expected = f"Expected: a name among {', '.join(_short(device) for device in known)}."
    received = f"Received: {name!r}."
    if not isinstance(name, str):
        raise TypeError(
            f"Argument `{argument}` has to hold names of devices. {expected} {received} Give the "
            'name as a string, such as "GPU:0".'
        )
    try:
        device = _full_name(name)
    except ValueError:
        device = ""
    if device not in known:
        raise ValueError(
            f"Argument `{argument}` names a device that this process does not have. {expected} "
            f"{received} Name one of these. A GPU that is missing here is hidden from TensorFlow, "
            "or TensorFlow did not find it; set logical devices by "
            "`tf.config.set_logical_device_configuration` before TensorFlow is used."
        )
    return device


def _checked_compute_devices(names: object, known: list[str]) -> list[str]:
    """Return the full names of the compute devices."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(
            "Argument `compute_devices` is a list of names of devices. Expected: such as "
            f'["GPU:0", "GPU:1"]. Received: compute_devices={names!r}. Put the names into a list, '
            "or leave it out to use all GPUs."
        )
    devices = [_checked_device("compute_devices", name, known) for name in names]
    if not devices or len(set(devices)) < len(devices):
        raise ValueError(
            "Argument `compute_devices` names no device, or one of them twice. Expected: at least "
            f"one device, each once. Received: compute_devices={names!r}. Each device has one "
            "replica; leave it out to use all GPUs."
        )
    return devices
