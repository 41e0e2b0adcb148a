"""Makes an `Input` of the data passed to `fit`. Workers read splits of it, or are sent batches.

Contract: an `Input` knows the spec of its batches, opens splits on workers, and knows where it
ends. It does not know how steps use batches, or which workers are available.
"""

from __future__ import annotations

from kerasps.inputs.arguments import check_arrays, no_batches, whole_number
from kerasps.inputs.class_weights import sample_weights
from kerasps.inputs.dataset_creator import DatasetCreator
from kerasps.inputs.dataset_graphs import (
    has_loops,
    makes_quickly_deleted,
    per_worker_dataset,
    python_calls,
    quickly_deleted,
)
from kerasps.inputs.make_input import InputArguments, as_input
from kerasps.inputs.source import Input, OpenDataset

__all__ = [
    "DatasetCreator",
    "Input",
    "InputArguments",
    "OpenDataset",
    "as_input",
    "check_arrays",
    "has_loops",
    "makes_quickly_deleted",
    "no_batches",
    "per_worker_dataset",
    "python_calls",
    "quickly_deleted",
    "sample_weights",
    "whole_number",
]
