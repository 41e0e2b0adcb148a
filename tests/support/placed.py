"""On which device each operation of a step is, as TensorFlow places it on a real worker.

A second CPU device stands for a GPU: it is told from the first as a GPU would be. Where there is
one, KERASPS_TEST_ACCELERATOR says so.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
from pathlib import Path

from google.protobuf import text_format
from tensorflow.core.framework import graph_pb2, types_pb2

from kerasps.step.phases.compute_phase import NAME_SCOPE

CPU, ACCELERATOR = "CPU:0", os.environ.get("KERASPS_TEST_ACCELERATOR", "CPU:1")
# What may be in the compute phase and yet is no work for a GPU.
OF_SCALARS = {"AddV2", "Cast", "Const", "FloorMod", "Identity", "Mul", "Neg", "Pow", "RealDiv"}
OF_SCALARS |= {"StatelessRandomGetKeyCounter", "Sub", "Reshape", "Select", "SelectV2", "Maximum"}


@contextlib.contextmanager
def writing_graphs(folder):
    """In this context, processes that start write the graphs that they run, when placed.

    So does this process, where TensorFlow has run none.
    """
    variables = {
        "TF_DUMP_GRAPH_PREFIX": str(folder),
        "TF_DUMP_GRAPH_NAME_FILTER": "*",
        "TF_DUMP_GRAPH_GROUPS": "main",
        "KERASPS_CPU_DEVICES": "3",
    }
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def placed_graphs(folder, job):
    """Return what there is of each graph that has a compute phase, on tasks of a job.

    By the name of its function: the devices of the operations of the phase, with their kinds; the
    kinds of other operations that are not on the first CPU; how many tensors go to the accelerator,
    how many come back, and how many calls of the phase there are.
    """
    reports = {}
    for path in sorted(Path(folder).glob("*.main.before_partition.pbtxt")):
        text = path.read_text()
        if NAME_SCOPE not in path.name and NAME_SCOPE not in text and "compute_" not in path.name:
            continue
        graph = graph_pb2.GraphDef()
        text_format.Parse(text, graph)
        name = re.match(r"__inference_(\w+?)_\d+", path.name).group(1)
        reports.setdefault(name, []).append(_report(graph, job, is_phase=name == "compute"))
    return reports


def placed_kinds(folder, kinds):
    """Return the devices of all operations of some kinds, by the kind."""
    devices = {kind: set() for kind in kinds}
    for path in Path(folder).glob("*.main.before_partition.pbtxt"):
        graph = graph_pb2.GraphDef()
        text_format.Parse(path.read_text(), graph)
        for node in graph.node:
            if node.op in devices:
                devices[node.op].add(node.device.rpartition("device:")[2])
    return {kind: sorted(found) for kind, found in devices.items()}


def conversions_on_accelerator(folder, name):
    """Return how many conversions the first graph of a function has, by their two dtypes."""
    path = min(Path(folder).glob(f"__inference_{name}_*.main.before_partition.pbtxt"))
    graph = graph_pb2.GraphDef()
    text_format.Parse(path.read_text(), graph)
    return collections.Counter(
        tuple(
            types_pb2.DataType.Name(node.attr[end].type).removeprefix("DT_").lower()
            for end in ("SrcT", "DstT")
        )
        for node in graph.node
        if node.op == "Cast" and node.device.endswith(ACCELERATOR)
    )


def _report(graph, job, *, is_phase):
    # A phase with loops is a function of its own, whose arguments are where they come from.
    devices = {node.name: node.device for node in graph.node}
    compute, others, calls = collections.defaultdict(set), set(), set()
    for node in graph.node:
        if f"/job:{job}/" not in node.device or node.op in ("_Arg", "_Retval"):
            continue
        device = node.device.rpartition("device:")[2]
        call = re.search(rf"{NAME_SCOPE}[_\d]*", node.name)
        if call:
            calls.add(call.group())
        if call or is_phase:
            compute[device].add(node.op)
        elif device != CPU:
            others.add(node.op)
    there, back = set(), set()
    for node in graph.node:
        for tensor in node.input:
            source = devices[tensor.lstrip("^").partition(":")[0]]
            if tensor.startswith("^") or source == node.device:
                continue
            if node.device.endswith(ACCELERATOR):
                there.add(tensor)
            elif source.endswith(ACCELERATOR):
                back.add((tensor, node.device))
    return {
        "compute": {device: sorted(kinds) for device, kinds in compute.items()},
        "others": sorted(others),
        "there": len(there),
        "back": len(back),
        "calls": len(calls),
    }
