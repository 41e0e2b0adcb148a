"""Keras layers of kerasps: an embedding that needs no vocabulary.

Contract: in the scope of a strategy of kerasps, the rows of a layer are on the ps. Without a
strategy, a layer works in one process.
"""

from __future__ import annotations

from kerasps.layers.dynamic_embedding import DynamicEmbedding

__all__ = ["DynamicEmbedding"]

# Users import it from here.
DynamicEmbedding.__module__ = __name__
