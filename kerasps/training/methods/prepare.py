"""Prepares a model for any of its methods under the strategy.

Models with stateful recurrent layers need to know the batch size. The trace of a step builds
unbuilt layers, but for batches of any size. The state of such a layer has a row for each example of
a batch, so Keras refuses to make it then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kerasps.inputs import DatasetCreator
from kerasps.training.contract.host import Host
from kerasps.variables.keras.adoption import adopt_model, strategy_of


def prepare(model: keras.Model) -> None:
    """Adopt the model if it was made outside of its strategy.

    Wait for functions that were scheduled before, since they change the variables too.
    """
    strategy = strategy_of(model)
    host: Host = strategy.extended.host
    if host.scheduled_calls is not None:
        host.scheduled_calls.wait_until_idle()
    adopt_model(strategy, model)


def build_stateful(model: keras.Model, first_batch: Callable[[], object]) -> None:
    """Build the model from its first batch, if a layer with `stateful=True` is not built yet."""
    layers = model._flatten_layers()
    if all(layer.built for layer in layers if getattr(layer, "stateful", False)):
        return
    batch = first_batch()
    if batch is not None:
        specs = keras.tree.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), batch)
        with model._distribute_strategy.scope():
            # Only traced, since a run would change the states.
            tf.function(lambda x: model(x), autograph=False).get_concrete_function(specs)


def first_batch_of(data: object, batch_size: int | None, steps: int | None = None) -> Any:
    """Return the inputs of the first batch of `data`, the `x` of `fit`.

    None if reading the batch would consume it, for example from a generator.
    """
    if isinstance(data, DatasetCreator):
        data = data(tf.distribute.InputContext(1, 0, num_replicas_in_sync=1))
    if isinstance(data, tf.data.Dataset):
        first = next(iter(data.take(1)), None)
    elif isinstance(data, keras.utils.PyDataset):
        first = data[0]
    else:
        leaves = keras.tree.flatten(data)
        if not leaves or not all(len(getattr(leaf, "shape", ())) for leaf in leaves):
            return None  # not arrays of examples: `as_input` raises the error
        length = leaves[0].shape[0]
        size = batch_size or (-(-length // steps) if steps else 32)
        return keras.tree.map_structure(lambda leaf: leaf[:size], data)
    return keras.utils.unpack_x_y_sample_weight(first)[0]
