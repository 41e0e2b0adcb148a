"""TensorFlow's operations that draw random numbers from a state of their kernel, by their names.

Such an operation has two attributes, `seed` and `seed2`. With seeds, each kernel begins the same
sequence and counts its calls. With zeros for both, each kernel takes a seed that nobody can tell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

# A `FunctionDef`, which TensorFlow has no public name for.
Function = Any

# They have attributes for seeds, and draw nothing by them in a step.
HARMLESS = {
    "AllCandidateSampler",  # returns all classes
    "ComputeAccidentalHits",
    "CudnnRNNCanonicalToParams",
    "CudnnRNNCanonicalToParamsV2",
    "CudnnRNNParamsSize",
    "CudnnRNNParamsToCanonical",
    "CudnnRNNParamsToCanonicalV2",
    "SnapshotDataset",  # names files by them
}
_CUDNN = re.compile(r"CudnnRNN(Backprop)?(V\d)?")
_POOLING = ("FractionalAvgPool", "FractionalMaxPool")
# Those of `tf.random.Generator`, whose state is a variable, and one without a seed.
_OF_GENERATORS = re.compile(r"(Rng|Stateful(?!PartitionedCall))\w+|NonDeterministicInts")


def draws(node: tf.compat.v1.NodeDef) -> bool:
    """Return True if an operation draws numbers from a state of its kernel."""
    if "seed2" not in node.attr or node.op in HARMLESS:
        return False
    if _CUDNN.fullmatch(node.op):
        return bool(node.attr["dropout"].f > 0)
    # Such a pooling draws its regions once, and uses them in all calls.
    return not (node.op in _POOLING and node.attr["deterministic"].b)


def draws_by_seed(node: tf.compat.v1.NodeDef) -> bool:
    """Return True if an operation draws the same sequence in each kernel, and counts its calls."""
    return draws(node) and bool(node.attr["seed"].i or node.attr["seed2"].i)


def without_seed(node: tf.compat.v1.NodeDef) -> None:
    """Let an operation draw numbers that differ from kernel to kernel."""
    node.attr["seed"].i = node.attr["seed2"].i = 0


def repeats(node: tf.compat.v1.NodeDef) -> bool:
    """Return False if an operation draws other numbers when it is called again."""
    return not (draws(node) or _OF_GENERATORS.fullmatch(node.op))


def functions_of(node: tf.compat.v1.NodeDef) -> list[Any]:
    """Return the records with the names of the functions that an operation calls."""
    found = [value.func for value in node.attr.values() if value.func.name]
    return found + [called for value in node.attr.values() for called in value.list.func]


def calls(node: tf.compat.v1.NodeDef, names: set[str]) -> bool:
    """Return True if an operation calls one of the functions with these names."""
    return any(called.name in names for called in functions_of(node))


def functions_with(
    condition: Callable[[tf.compat.v1.NodeDef], bool], functions: Iterable[Function]
) -> set[str]:
    """Return the names of the functions that have such an operation, or call one that has."""
    bodies = {function.signature.name: function.node_def for function in functions}
    found = {name for name, body in bodies.items() if any(map(condition, body))}
    before = -1
    while len(found) != before:
        before = len(found)
        found |= {name for name, body in bodies.items() if any(calls(node, found) for node in body)}
    return found
