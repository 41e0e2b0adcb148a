"""The dtype in which values of a variable, and gradients, travel between a ps and a worker."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class WireRule:
    """Says which variables travel in 16 bits. They are stored, and updated, in their own dtype.

    Attributes:
        choices: pairs of a part of a variable's path and the name of a dtype, None for the
            variable's own. The first pair whose part is in the path decides.
    """

    choices: tuple[tuple[str, str | None], ...] = ()

    def dtype_of(self, path: str, dtype: tf.DType) -> tf.DType:
        """Return the dtype in which a variable travels.

        Args:
            path: its path, such as `"dense/kernel"`.
            dtype: its dtype. Only float32 travels in another.
        """
        if dtype == tf.float32:
            for part, wire_dtype in self.choices:
                if part in path:
                    return dtype if wire_dtype is None else tf.as_dtype(wire_dtype)
        return dtype
