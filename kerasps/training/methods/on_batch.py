"""The methods of a model on one batch, as a step on the coordinator."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasps.cluster.description.worker_devices import FIRST_CPU
from kerasps.errors import InputError
from kerasps.inputs import check_arrays, sample_weights
from kerasps.runtime.devices import COORDINATOR_CPU
from kerasps.runtime.errors import translated_errors
from kerasps.step import PREDICT, TEST, TRAIN, ExecutionResult, Mode, TracedStep
from kerasps.step.running.make_step import explaining, step_function
from kerasps.step.tracing.runners import ALONE
from kerasps.step.tracing.state import Header
from kerasps.training.contract.host import Host, host_of
from kerasps.training.contract.metrics import merge_once
from kerasps.training.loop.outputs import concatenated
from kerasps.training.loop.step_numbers import StepNumbers
from kerasps.training.methods.keras_rules import check_compiled, plain_logs
from kerasps.training.methods.prepare import build_stateful, prepare
from kerasps.variables import wait_for_steps
from kerasps.variables.lanes.flights import Flight, Holders

_LOGGER = logging.getLogger("kerasps")
_warned: weakref.WeakSet[Host] = weakref.WeakSet()


def train_on_batch(
    model: keras.Model,
    x: object,
    y: object = None,
    sample_weight: object = None,
    class_weight: Mapping[int, float] | None = None,
    return_dict: bool = False,
) -> Any:
    """`keras.Model.train_on_batch`: compute on the coordinator, push to the ps as a step of `fit`.

    Metrics cover only this batch, under every version of Keras; plain Keras 3.12 adds them up from
    call to call.
    """
    check_compiled(model)
    if class_weight is not None:
        if sample_weight is not None:
            raise InputError(
                "Give `class_weight` or `sample_weight` to `train_on_batch`. Received: both."
            )
        sample_weight = sample_weights(y, class_weight)
    logs = _logs_on_batch(model, TRAIN, (x, y, sample_weight))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def test_on_batch(
    model: keras.Model,
    x: object,
    y: object = None,
    sample_weight: object = None,
    return_dict: bool = False,
) -> Any:
    """`keras.Model.test_on_batch`, on the coordinator."""
    check_compiled(model)
    logs = _logs_on_batch(model, TEST, (x, y, sample_weight))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def predict_on_batch(model: keras.Model, x: object) -> Any:
    """`keras.Model.predict_on_batch`, on the coordinator."""
    _, result = _run_on_batch(model, PREDICT, (x, None, None))
    return concatenated(result.outputs)


def _logs_on_batch(
    model: keras.Model, mode: Mode, batch: tuple[object, object, object]
) -> dict[str, Any]:
    function, result = _run_on_batch(model, mode, batch)
    return plain_logs(merge_once(model, function, result))


def _run_on_batch(
    model: keras.Model, mode: Mode, batch: tuple[object, object, object]
) -> tuple[TracedStep, ExecutionResult]:
    x, y, sample_weight = batch
    check_arrays(is_batch=True, x=x, y=y, sample_weight=sample_weight)
    wait_for_steps()
    prepare(model)
    packed = keras.tree.lists_to_tuples(keras.utils.pack_x_y_sample_weight(*batch))
    packed = keras.tree.map_structure(_as_tensor, packed)
    build_stateful(model, lambda: keras.utils.unpack_x_y_sample_weight(packed)[0])
    if mode is not PREDICT:
        model.reset_metrics()  # before the step builds new ones
    spec = tf.nest.map_structure(
        lambda t: None if t is None else tf.TensorSpec([None, *t.shape[1:]], t.dtype), packed
    )
    host = host_of(model)
    _warn_of_local_step(host, f"`{mode.name}_on_batch`")
    with translated_errors(host):
        devices = host.own_devices
        with explaining(model, mode, spec):
            function = step_function(model, mode, spec, [devices], fused=False)
        host.before_steps(model, mode, function, [packed])
        numbers = StepNumbers(model, function)
        with tf.device(COORDINATOR_CPU):
            execution = function.step_graph(
                None,
                1,
                checked=False,
                runner=ALONE,
                devices=devices,
            )
        result = _run_alone(function, execution, [packed], numbers.next_header(1))
        numbers.confirm(1)
    return function, result


def _as_tensor(value: object) -> Any:
    if value is None or isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return value
    tensor = tf.convert_to_tensor(value)
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype == tf.float64 else tensor


def _warn_of_local_step(host: Host, what: str) -> None:
    """Log once that this process computes on its CPU, although workers have GPUs."""
    has_gpu = any(devices[0] != FIRST_CPU for devices in host.devices_of_workers())
    if has_gpu and host.own_devices == (FIRST_CPU,) and host not in _warned:
        _warned.add(host)
        _LOGGER.warning(
            f"{what} computes in the coordinator's process, on its CPU. The workers have GPUs: use "
            "`fit`, `evaluate` or `predict` to run steps there."
        )


def _run_alone(
    step: TracedStep,
    graph: tf.types.experimental.ConcreteFunction,
    batches: Sequence[object],
    header: Header,
) -> ExecutionResult:
    """Run a step graph on the coordinator, in a separate flight.

    Call when no other execution runs.
    """
    owner = threading.Lock()

    def work(flight: Flight) -> ExecutionResult:
        step.load()
        try:
            with tf.device(COORDINATOR_CPU):
                return step.run(graph, None, batches, header)
        finally:
            step.store()

    flight = Flight(owner, work, lambda: Holders("a ps does not answer"))
    with owner:
        flight.start()
        flight.wait()
    if flight.error is not None:
        raise flight.error
    result: ExecutionResult = flight.result
    return result
