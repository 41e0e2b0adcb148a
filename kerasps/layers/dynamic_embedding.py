"""`DynamicEmbedding`: an embedding of any ids, without a vocabulary."""

from __future__ import annotations

import random
from collections.abc import MutableMapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kerasps.central_storage import CentralStorageStrategy
from kerasps.dynamic.ids.admission import CountAdmission, ProbabilityAdmission, admission_of
from kerasps.dynamic.ids.eviction import Eviction, eviction_of
from kerasps.dynamic.ids.first_rows import FirstRows
from kerasps.dynamic.ids.keys import as_ids
from kerasps.dynamic.ids.rows_of_ids import MOST_ROWS, CountsOfIds, RowsOfIds, UsageOfRows
from kerasps.dynamic.local.local_table import LocalTable
from kerasps.dynamic.tables.row_files import save_table
from kerasps.errors import InputError, UnsupportedError
from kerasps.hooks import patch, table
from kerasps.layers.arguments import refuse, refuse_vectorized_map, whole_number
from kerasps.layers.bags import are_alike, bags_of, described, is_ragged, is_sparse
from kerasps.layers.rows_by_hand import LayerWithRows
from kerasps.saving.saved_model import Export
from kerasps.saving.updatable import UpdatableExport
from kerasps.variables.lanes.phase import (
    current_phase,
    strategy_of_new_variables,
)
from kerasps.variables.placing.placing import is_ours

_COMBINERS = ("sum", "mean", "sqrtn")
# The entries of a file that have the candidates and their counts.
_CANDIDATES, _COUNTS = "candidates", "counts"
# Those that have the use of rows.
_USED, _USAGE = "used_ids", "usage"
_DEFAULT_ROWS = ("first", "zeros")


@keras.saving.register_keras_serializable(package="kerasps")
class DynamicEmbedding(LayerWithRows):
    """Turns ids into dense vectors, and makes the row of an id when it is first trained.

    It needs no vocabulary and no `input_dim`: ids are any integers, also negative ones, or strings.
    `fit` makes the rows that it updates. `evaluate`, `predict` and other calls make none: an id
    without a row has its first row, which follows from `seed` and the id alone.

    ```python
    model = keras.Sequential([
        keras.Input((2,), dtype="int64"),
        kerasps.layers.DynamicEmbedding(16),
        keras.layers.Flatten(),
        keras.layers.Dense(1),
    ])
    model.compile("adagrad", "mse")
    model.fit(np.array([[7, -3], [7, 2**40]]), np.array([1.0, 0.0]), verbose=0)
    print(model.layers[0].num_rows)  # 3
    ```

    A string has the row of its 64-bit fingerprint (`tf.fingerprint`). The chance that any two of
    100 million strings share one is 0.03%.

    Without a strategy, and with a `CentralStorageStrategy`, the table is in this process. There it
    has `max_rows` places from the start, or a million, and an optimizer such as Adam updates all of
    them in each step. So a small `max_rows` makes steps faster.

    Args:
        output_dim: the length of a row.
        embeddings_initializer: the distribution of first rows: Zeros, Ones, Constant of a number,
            RandomUniform, RandomNormal, TruncatedNormal or VarianceScaling, whose fans are those
            of a matrix with one row. Default `"uniform"`.
        embeddings_regularizer: the regularizer of the rows. Default None.
        mask_zero: mask the id 0, and the empty string. In a bag they do not count. Default False.
        combiner: `"sum"`, `"mean"` or `"sqrtn"`: join the rows of a bag as
            `tf.nn.embedding_lookup_sparse` does. Bags are along the last axis of `ids`; an empty
            one gives zeros. Default None: a row for each id.
        max_rows: the most rows that the table may have. When it is full, an id without a row
            keeps its first row. Default None: as many as the memory holds.
        max_bytes_per_ps: the most bytes of a ps that rows, their slots and what finds them may
            take, as a bound beside `max_rows` or without it. A row counts 64 bytes more than its
            values and slots. Default None: no such limit.
        admission: the rule by which ids get rows: a `CountAdmission` or a `ProbabilityAdmission`.
            An id without a row reads its default row, and its gradients are dropped and counted.
            Default None: the first step that updates an id makes its row.
        default_row: what an id without a row reads: `"first"`, its first row, or `"zeros"`. A row
            that is made begins as its first row. Default `"first"`.
        eviction: an `Eviction`, the rule by which rows are given up for new ids. It needs
            `max_rows` or `max_bytes_per_ps`. Default None: all rows stay.
        seed: the seed of first rows, any integer. The seed of the initializer is not used. Default
            None: drawn at random, and kept in the configuration of the layer.
        dtype: the dtype or the dtype policy of the layer. Default: `keras.config.dtype_policy()`.
        name: the name of the layer.

    Call arguments:
        ids: integers or strings, as a tensor of any shape, `tf.RaggedTensor` or, with a
            `combiner`, `tf.SparseTensor` of two axes.
        weights: with a `combiner`, the weight of each id, of the same structure as `ids`. Default
            None: 1 each.
        training: in one process, make the rows that are missing, if the layer is trainable. If it
            is not True, rows are made when a gradient reaches them.

    Raises:
        InputError: an argument has a value that cannot be used.
        UnsupportedError: the initializer is another one, or the layer is built in the scope of a
            strategy that is not of kerasps.
    """

    def __init__(
        self,
        output_dim: int,
        embeddings_initializer: object = "uniform",
        embeddings_regularizer: object = None,
        mask_zero: bool = False,
        combiner: str | None = None,
        max_rows: int | None = None,
        max_bytes_per_ps: int | None = None,
        admission: CountAdmission | ProbabilityAdmission | None = None,
        default_row: str = "first",
        eviction: Eviction | None = None,
        seed: int | None = None,
        dtype: object = None,
        name: str | None = None,
        **kwargs: object,
    ) -> None:
        self.output_dim = whole_number("output_dim", output_dim, "such as 16", least=1)
        if combiner not in (None, *_COMBINERS):
            refuse(
                "combiner", repr(combiner), "'sum', 'mean', 'sqrtn' or None", "Give one of these"
            )
        if max_rows is not None:
            max_rows = whole_number(
                "max_rows", max_rows, "or None for no limit", least=1, most=MOST_ROWS - 1
            )
        if max_bytes_per_ps is not None:
            max_bytes_per_ps = whole_number(
                "max_bytes_per_ps", max_bytes_per_ps, "or None for no limit", least=1024
            )
        if seed is None:
            # From the generator that `keras.utils.set_random_seed` sets.
            seed = random.randrange(2**31)
        if default_row not in _DEFAULT_ROWS:
            refuse("default_row", repr(default_row), "'first' or 'zeros'", "Give one of these")
        seed = whole_number("seed", seed, "or None for one that is drawn")
        super().__init__(dtype=dtype, name=name, **kwargs)
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.mask_zero = bool(mask_zero)
        self.combiner = combiner
        self.max_rows, self.max_bytes_per_ps = max_rows, max_bytes_per_ps
        self.admission = admission_of(admission)
        self.default_row = default_row
        self.eviction = eviction_of(eviction)
        if self.eviction is not None:
            self._check_bounds(self.eviction)
        self.seed = seed
        # Ids and weights come as they are.
        self.autocast = False
        self.supports_masking = self.mask_zero
        # XLA has no hash tables, and would change the last bits of first rows.
        self.supports_jit = False
        self._local: LocalTable | None = None
        # The weight with the counts of candidates.
        self._candidates: Any = None
        # The use of each row, with eviction.
        self._usage: Any = None
        # An initializer that cannot be used is refused here, not in `build`.
        self._first_rows()

    def _first_rows(self) -> FirstRows:
        return FirstRows.of(self.embeddings_initializer, self.output_dim, self.variable_dtype)

    def build(self, input_shape: object = None) -> None:
        """Make the table. The shape of the ids does not matter."""
        del input_shape
        initializer = RowsOfIds(
            self._first_rows(),
            self.seed,
            self.max_rows,
            admission=self.admission,
            reads_zeros=self.default_row == "zeros",
            eviction=self.eviction,
            max_bytes_per_ps=self.max_bytes_per_ps,
        )
        self.rows_of_ids = initializer
        strategy = strategy_of_new_variables()
        if is_ours(strategy):
            self.embeddings = self.add_weight(
                name="embeddings",
                shape=(MOST_ROWS, self.output_dim),
                initializer=initializer,
                regularizer=self.embeddings_regularizer,
                autocast=False,
            )
            if self.eviction is not None:
                self._usage = self.add_weight(
                    name="usage",
                    shape=(MOST_ROWS, len(self.eviction.columns)),
                    dtype="int32",
                    initializer=UsageOfRows(self.embeddings.storage, self.eviction),
                    trainable=False,
                    autocast=False,
                )
            if self.admission is not None and self.admission.max_candidates is not None:
                self._candidates = self.add_weight(
                    name="candidates",
                    shape=(MOST_ROWS, 1),
                    dtype="int32",
                    initializer=CountsOfIds(self.admission.max_candidates, self.embeddings.storage),
                    trainable=False,
                    autocast=False,
                )
            # A step finds the rows before the part of it that XLA may compile.
            self.supports_jit = True
            return
        if tf.distribute.has_strategy() and not isinstance(strategy, CentralStorageStrategy):
            raise UnsupportedError(
                "A DynamicEmbedding cannot be built in the scope of this strategy. Expected: a "
                "strategy of kerasps, or none. Received: "
                f"{type(strategy).__name__}. Use one of those."
            )
        patch.install(table.ONE_PROCESS, {})
        self._local = LocalTable(self.add_weight, initializer, self.embeddings_regularizer)
        self.embeddings = self._local.rows
        if self._local.candidates is not None:
            self._candidates = self._local.candidates.rows
        if self._local.usage is not None:
            self._usage = self._local.usage.use

    def _check_bounds(self, eviction: Eviction) -> None:
        if self.max_rows is None and self.max_bytes_per_ps is None:
            refuse("max_rows", "None", "a number, with `eviction`", "Give both")
        if self.max_rows is not None and eviction.min_rows > eviction.low * self.max_rows:
            refuse(
                "eviction",
                f"{eviction!r} and max_rows={self.max_rows:,}",
                "`min_rows` of at most `low * max_rows`",
                "Give a smaller `min_rows`",
            )

    def call(
        self, ids: tf.Tensor, weights: tf.Tensor | None = None, training: bool | None = None
    ) -> tf.Tensor:
        """Return the rows of ids, or of bags of them."""
        self._check(ids, weights)
        training = bool(training)
        if self.combiner is not None:
            rows = self._combined(ids, weights, training)
        elif isinstance(ids, tf.RaggedTensor):
            rows = ids.with_flat_values(self._take(ids.flat_values, training))
        else:
            rows = self._take(ids, training)
        return tf.cast(rows, self.compute_dtype)

    def _take(self, ids: tf.Tensor, training: bool) -> tf.Tensor:
        refuse_vectorized_map(self.name)
        ids = as_ids(tf.convert_to_tensor(ids))
        phase = current_phase()
        if isinstance(phase, UpdatableExport):
            return phase.take(self.embeddings.path, ids)
        if self._local is None:
            return self.embeddings.take(ids)
        if not isinstance(phase, Export | None):
            raise UnsupportedError(
                f"The layer {self.name!r} was built outside of the scope of the strategy, so its "
                "table is in this process, where workers do not reach it. Expected: a "
                "`DynamicEmbedding` that is built in the scope. Received: one whose table is in "
                "this process. Make the model within `strategy.scope()`, and load its weights from "
                "a file."
            )
        return self._local.take(ids, training=training, trainable=self.trainable)

    def _combined(self, ids: tf.Tensor, weights: tf.Tensor | None, training: bool) -> tf.Tensor:
        bags = bags_of(ids)
        values, bag_of, factors = bags.values, bags.bag_of, None
        if weights is not None:
            factors = tf.cast(bags_of(weights).values, self.variable_dtype)
            # Not `assert_equal`, whose message names tensors, so that models share step graphs.
            same_size = tf.debugging.Assert(
                tf.equal(tf.size(factors), tf.size(values)),
                ["`weights` and `ids` differ in size.", tf.size(factors), tf.size(values)],
            )
            with tf.control_dependencies([] if same_size is None else [same_size]):
                factors = tf.identity(factors)
        if self.mask_zero:
            kept = tf.not_equal(values, tf.zeros([], values.dtype))
            values, bag_of = tf.boolean_mask(values, kept), tf.boolean_mask(bag_of, kept)
            factors = None if factors is None else tf.boolean_mask(factors, kept)
        rows = self._take(values, training)
        if factors is None:
            factors = tf.ones(tf.shape(values), rows.dtype)
        else:
            rows *= factors[:, None]
        sums = tf.math.unsorted_segment_sum(rows, bag_of, bags.number)
        if self.combiner != "sum":
            of_mean = self.combiner == "mean"
            divisor = tf.math.unsorted_segment_sum(
                factors if of_mean else tf.square(factors), bag_of, bags.number
            )
            divisor = divisor if of_mean else tf.sqrt(divisor)
            sums = tf.math.divide_no_nan(sums, divisor[:, None])
        return bags.restored(sums)

    def _check(self, ids: tf.Tensor, weights: tf.Tensor | None) -> None:
        """Raise `InputError` for inputs, tensors or symbolic ones, that the layer cannot use."""
        dtype = tf.as_dtype(ids.dtype)
        if dtype == tf.string:  # XLA has no strings
            self.supports_jit = False
        if not dtype.is_integer and dtype != tf.string:
            raise InputError(
                "Ids of a table without a vocabulary are of another type. Expected: integers or "
                f"strings. Received: {dtype.name}. Give the model an input such as "
                "`keras.Input((1,), dtype='int64')`, also as the first layer of a "
                "`keras.Sequential`, and integers or strings as data."
            )
        if self.combiner is None:
            if is_sparse(ids):
                raise InputError(
                    "A sparse tensor of ids has no row for each place. Expected: with "
                    "`combiner=None`, a dense or ragged tensor. Received: a sparse tensor. Give "
                    "the layer a `combiner`, such as 'sum', or convert the ids by "
                    "`tf.sparse.to_dense`."
                )
            if weights is not None:
                raise InputError(
                    "Weights of ids have no effect without a combiner. Expected: "
                    "`combiner='sum'`, 'mean' or 'sqrtn'. Received: weights and `combiner=None`. "
                    "Give the layer a `combiner`, or leave out `weights`."
                )
            return
        rank = len(ids.shape)
        if rank < 2 or (is_sparse(ids) and rank > 2):
            raise InputError(
                "Ids are not in bags. Expected: with a `combiner`, a dense or ragged tensor of at "
                "least two axes, the last along a bag, or a sparse one of two. Received: "
                f"{described(ids)}. Reshape the ids, or make the layer without a `combiner`."
            )
        if weights is not None and not are_alike(ids, weights):
            raise InputError(
                "`weights` is not of the structure of `ids`. Expected: a weight for each id, in "
                f"{described(ids)}. Received: {described(weights)}. Give the weights as tensors "
                "of the same kind and shape."
            )

    def compute_mask(self, inputs: tf.Tensor, mask: object = None) -> tf.Tensor | None:
        """Return True where an id is neither 0 nor the empty string; None for bags."""
        del mask
        if not self.mask_zero or self.combiner is not None:
            return None
        if isinstance(inputs, keras.KerasTensor):
            return keras.ops.not_equal(inputs, "" if inputs.dtype == "string" else 0)
        return tf.not_equal(inputs, tf.zeros([], inputs.dtype))

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Return the shape of the rows of ids, or of bags of them."""
        axes = tuple(input_shape)
        return (*(axes if self.combiner is None else axes[:-1]), self.output_dim)

    def compute_output_spec(
        self, ids: tf.Tensor, weights: tf.Tensor | None = None, training: bool | None = None
    ) -> keras.KerasTensor:
        """Return the shape and dtype of the rows of ids, or of bags of them."""
        del training
        self._check(ids, weights)
        shape = self.compute_output_shape(ids.shape)
        # Bags along the only ragged axis give a dense tensor.
        ragged = is_ragged(ids) and (self.combiner is None or len(ids.shape) > 2)
        return keras.KerasTensor(shape, dtype=self.compute_dtype, ragged=ragged)

    def count_params(self) -> int:
        """Return the number of elements of the rows that there are."""
        return self.num_rows * self.output_dim

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer, with the seed if it was drawn."""
        return {
            **super().get_config(),
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "mask_zero": self.mask_zero,
            "combiner": self.combiner,
            "max_rows": self.max_rows,
            "max_bytes_per_ps": self.max_bytes_per_ps,
            "admission": keras.saving.serialize_keras_object(self.admission),
            "default_row": self.default_row,
            "eviction": keras.saving.serialize_keras_object(self.eviction),
            "seed": self.seed,
        }

    def save_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        """Write ids and rows, in the order of the ids."""
        if not self.built:
            return
        if self._candidates is not None:
            save_table(store, self._candidates, ids_name=_CANDIDATES, rows_name=_COUNTS)
        if self._usage is not None:
            save_table(store, self._usage, ids_name=_USED, rows_name=_USAGE)
        save_table(store, self.embeddings)

    def load_own_variables(self, store: MutableMapping[str, np.ndarray]) -> None:
        """Replace the rows of the table by those of a file."""
        names = sorted(store.keys())
        if not {"ids", "rows"}.issubset(names):
            raise InputError(
                f"The file has no table for the layer {self.name!r}. Expected: ids and rows. "
                f"Received: {', '.join(names) or 'nothing'}. Load the file of a model with a "
                "DynamicEmbedding here, or give the rows of another layer to `load_rows`."
            )
        if self._candidates is not None:
            # A file of a layer that does not count has none.
            names_there = {_CANDIDATES, _COUNTS} <= set(names)
            candidates = np.asarray(store[_CANDIDATES]) if names_there else np.zeros(0, np.int64)
            numbers = np.asarray(store[_COUNTS]) if names_there else np.zeros((0, 1), np.int32)
            self._candidates.replace_rows(candidates, numbers)
        ids, rows = np.asarray(store["ids"]), store["rows"]
        if rows.shape != (len(ids), self.output_dim):
            raise InputError(
                f"The rows of a file do not fit the layer {self.name!r}. Expected: shape "
                f"({len(ids)}, {self.output_dim}). Received: shape {rows.shape}. Make the layer "
                "with the `output_dim` of the file."
            )
        # On ps, large rows are read from the file in pieces.
        self.embeddings.replace_rows(ids, rows)
        if self._usage is not None and {_USED, _USAGE} <= set(names):
            usage = np.asarray(store[_USAGE])
            # Of a layer with another eviction, the rows are as if they were made now.
            if usage.shape[1] == self._usage.shape[1]:
                self._usage.replace_rows(np.asarray(store[_USED]), usage)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: object) -> Any:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "savedmodel":
            # All that a checkpoint has of the table is among the rows, as on ps.
            children.pop("_local", None)
        return children
