"""The dtype in which a ps and a worker send each other a variable's values and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf


@dataclass(frozen=True)
class WireRule:
    """Says which variables are sent in 16 bits. The ps stores and updates them in their dtype."""

    # Pairs of a part of a variable's path and the name of a dtype, None for the variable's dtype.
    # The first pair whose part is in the path decides.
    choices: tuple[tuple[str, str | None], ...] = ()

    def dtype_of(self, path: str, dtype: tf.DType) -> tf.DType:
        """Return the dtype in which a variable is sent: its own, but for some of float32."""
        if dtype == tf.float32:
            for part, wire_dtype in self.choices:
                if part in path:
                    return dtype if wire_dtype is None else tf.as_dtype(wire_dtype)
        return dtype
