"""`DatasetCreator`: a function with which each worker makes its dataset."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import tensorflow as tf


class DatasetCreator:
    """Wraps a function that makes the dataset of one worker.

    `fit` calls `dataset_fn` once per worker, in the coordinator's process. The pipeline runs on the
    worker: only its graph is sent, no data. An element of the dataset is a batch: `x`, `(x, y)` or
    `(x, y, sample_weight)`.

    ```python
    x, y = np.ones((1000, 64)), np.ones(1000)

    def dataset_fn(context):
        dataset = tf.data.Dataset.from_tensor_slices((x, y))
        dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.shuffle(1000, seed=1).repeat().batch(32)

    # `model` is one of a `ParameterServerStrategy`.
    model.fit(kerasps.DatasetCreator(dataset_fn), epochs=3, steps_per_epoch=50)
    ```

    Args:
        dataset_fn: a callable of a `tf.distribute.InputContext` that returns a batched
            `tf.data.Dataset`. Its context has `num_input_pipelines` (the number of workers) and
            `input_pipeline_id` (this worker's index) as Python integers. It must not create
            variables. Give each `shuffle` in it a seed: the dataset of a lost worker is made again,
            and reading continues after its last result.
        input_options: a `tf.distribute.InputOptions`, as in Keras 2. Only
            `experimental_fetch_to_device=False` has an effect in TensorFlow, and workers always
            behave so: batches stay on their host until they are used. Default None.

    Raises:
        TypeError: `dataset_fn` is not callable with one argument, or `input_options` is not a
            `tf.distribute.InputOptions`.

    Follows `tf.keras.utils.experimental.DatasetCreator` of Keras 2.
    """

    def __init__(
        self,
        dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        input_options: tf.distribute.InputOptions | None = None,
    ) -> None:
        if not callable(dataset_fn):
            raise TypeError(
                "Argument `dataset_fn` must be a callable that takes a "
                "`tf.distribute.InputContext` and returns a `tf.data.Dataset`. Received: "
                f"dataset_fn={dataset_fn!r}. Wrap a dataset like this: `DatasetCreator(lambda "
                "context: dataset)`."
            )
        _check_takes_context(dataset_fn)
        if input_options is not None and not isinstance(input_options, tf.distribute.InputOptions):
            raise TypeError(
                "Argument `input_options` must be a `tf.distribute.InputOptions` or None. "
                f"Received: input_options={input_options!r}. Leave it out."
            )
        self._dataset_fn = dataset_fn
        self._input_options = input_options

    @property
    def input_options(self) -> tf.distribute.InputOptions | None:
        """The `tf.distribute.InputOptions` of the constructor, or None."""
        return self._input_options

    def __call__(self, input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        """Return the dataset of the worker that `input_context` describes.

        Raises:
            TypeError: `dataset_fn` did not return a `tf.data.Dataset`.
        """
        try:
            dataset = self._dataset_fn(input_context)
        except Exception as exc:
            worker, num_workers = input_context.input_pipeline_id, input_context.num_input_pipelines
            exc.add_note(
                f"Raised by the `dataset_fn` of a `DatasetCreator` for worker {worker} of "
                f"{num_workers}."
            )
            raise
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                "The `dataset_fn` of a `DatasetCreator` must return a batched `tf.data.Dataset`. "
                f"Received: {dataset!r} of type {type(dataset).__name__}. Return one, such as "
                "`tf.data.Dataset.from_tensor_slices((x, y)).batch(32)`."
            )
        return dataset

    def __repr__(self) -> str:
        return f"<DatasetCreator {getattr(self._dataset_fn, '__qualname__', self._dataset_fn)}>"


def _check_takes_context(dataset_fn: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(dataset_fn)
    except (TypeError, ValueError):  # some functions in C have no signature
        return
    try:
        signature.bind("context")
    except TypeError as exc:
        raise TypeError(
            "Argument `dataset_fn` cannot be called with one argument, its "
            "`tf.distribute.InputContext`. Expected: a function like `def dataset_fn(context)`. "
            f"Received: dataset_fn={dataset_fn!r}, with the parameters {signature} ({exc}). Bind "
            "other parameters with `functools.partial`, or add the missing one."
        ) from None
