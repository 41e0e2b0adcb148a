"""The methods of a model on one batch: a step on the coordinator."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from kerasps.cluster import COORDINATOR_CPU, translated_errors
from kerasps.errors import InputError
from kerasps.inputs import sample_weights
from kerasps.step import PREDICT, TEST, TRAIN, ExecutionResult, Mode, TracedStep, step_function
from kerasps.training.keras_rules import check_compiled, plain_logs
from kerasps.training.metrics import merge_once
from kerasps.training.outputs import concatenated
from kerasps.training.prepare import prepare
from kerasps.training.stateful import build_stateful
from kerasps.training.step_numbers import StepNumbers
from kerasps.variables import come_to_rest


def train_on_batch(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    class_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    """`keras.Model.train_on_batch`: compute on the coordinator, push to the ps as a step of `fit`.

    Metrics are those of this batch alone, under every version of Keras; Keras 3.12 itself adds them
    up from call to call.
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
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    return_dict: bool = False,
) -> Any:
    """`keras.Model.test_on_batch`, on the coordinator."""
    check_compiled(model)
    logs = _logs_on_batch(model, TEST, (x, y, sample_weight))
    return logs if return_dict else model._flatten_metrics_in_order(logs)


def predict_on_batch(model: keras.Model, x: Any) -> Any:
    """`keras.Model.predict_on_batch`, on the coordinator."""
    _, result = _run_on_batch(model, PREDICT, (x, None, None))
    return concatenated(result.outputs)


def _logs_on_batch(model: keras.Model, mode: Mode, batch: tuple[Any, Any, Any]) -> dict[str, Any]:
    function, result = _run_on_batch(model, mode, batch)
    model.reset_metrics()
    return plain_logs(merge_once(model, function, result))


def _run_on_batch(
    model: keras.Model, mode: Mode, batch: tuple[Any, Any, Any]
) -> tuple[TracedStep, ExecutionResult]:
    come_to_rest()
    prepare(model)
    packed = keras.tree.lists_to_tuples(keras.utils.pack_x_y_sample_weight(*batch))
    packed = keras.tree.map_structure(_as_tensor, packed)
    build_stateful(model, lambda: keras.utils.unpack_x_y_sample_weight(packed)[0])
    spec = tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), packed)
    with translated_errors(model._distribute_strategy):
        function = step_function(model, mode, spec, fused=False)
        numbers = StepNumbers(model, function)
        with tf.device(COORDINATOR_CPU):
            execution = function.step_graph(
                None, 1, checked=False, keeps_totals=False, on_coordinator=True
            )
        result = function.run_alone(execution, [packed], numbers.next_header(1))
        numbers.settle(1)
    return function, result


def _as_tensor(value: Any) -> Any:
    if value is None or isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return value
    tensor = tf.convert_to_tensor(value)
    return tf.cast(tensor, keras.config.floatx()) if tensor.dtype == tf.float64 else tensor
