"""Random operations of TensorFlow in a step: what they draw follows from the number of the step.

`tf.random.uniform`, `tf.nn.dropout` and others keep a state in their kernel. A step graph has a
kernel for each unrolled step, and each worker has all of them. If they have seeds, as after
`keras.utils.set_random_seed`, all these kernels would begin the same sequence. So a stateless
operation replaces each of them in the graph of the compute phase. Its seed is made of the seeds of
the operation and of a count of the model's steps, which is sent as the state of a seed generator.
Operations with the same seeds draw the same numbers, as they do in plain Keras.

The count enters functions of conditions and calls as an argument. A loop counts its iterations with
it. An operation that has no stateless counterpart, or that is in another kind of function, loses
its seeds instead: then no two kernels draw the same.

XLA ignores these seeds, and begins with the same number in each process. So in a step that it
compiles, all random operations are replaced, those without seeds by their place.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.description.worker_devices import FIRST_CPU
from kerasps.step.draws.random_operations import (
    Function,
    calls,
    draws,
    draws_by_seed,
    functions_of,
    functions_with,
    without_seed,
)
from kerasps.step.draws.stateless_draws import ALIKE, COMPILED, WRITTEN, can_replace
from kerasps.variables import ParameterServerVariable, entering

# The operations that call functions with their own inputs, and the attribute of their types.
_CALLS = {
    "Case": "Tin",
    "If": "Tin",
    "PartitionedCall": "Tin",
    "StatefulPartitionedCall": "Tin",
    "StatelessCase": "Tin",
    "StatelessIf": "Tin",
    "StatelessWhile": "T",
    "While": "T",
}
_LOOPS = ("StatelessWhile", "While")
# The argument of a function that holds the seeds of the step.
_ARGUMENT = "kerasps_seeds"
_INT64 = tf.int64.as_datatype_enum

_Node = Any

# By model or strategy: the generator whose counter is the count of steps.
_counts: weakref.WeakKeyDictionary[Any, keras.random.SeedGenerator] = weakref.WeakKeyDictionary()


def repeats_draws(graph_def: tf.compat.v1.GraphDef, *, compiled: bool) -> bool:
    """Return True if copies of a graph would draw the same random numbers.

    Args:
        compiled: whether XLA compiles it. Then it ignores seeds, and begins the same in each
            process.
    """
    is_draw = draws if compiled else draws_by_seed
    functions = graph_def.library.function
    bodies = [graph_def.node, *(function.node_def for function in functions)]
    return any(is_draw(node) for body in bodies for node in body)


def count_of(owner: object, strategy: tf.distribute.Strategy) -> ParameterServerVariable:
    """Return the count of the steps of a model, or of a strategy's custom loops; make it once."""
    if owner not in _counts:
        with tf.init_scope(), entering(None), strategy.scope():
            _counts[owner] = keras.random.SeedGenerator(0)
    state: ParameterServerVariable = _counts[owner].state
    return state


def is_count(state: ParameterServerVariable) -> bool:
    """Return True if the state of a generator is a count of steps."""
    return any(generator.state is state for generator in _counts.values())


def with_draws_of_step(
    function: tf.types.experimental.ConcreteFunction,
    counts: Sequence[str],
    replica_of: Callable[[int], int],
    make: Callable[[Callable[..., object]], object],
    *,
    compiled: bool,
) -> Any:
    """Return a concrete function that draws by its step's count, and else does the same.

    Args:
        counts: the name of the input that has the count of the step, by replica.
        replica_of: returns the replica of an operation, by its place in the graph.
    """
    graph = function.graph
    graph_def = graph.as_graph_def()
    rewriting = _Rewriting(graph_def.library.function, compiled=compiled)
    captured = function.captured_inputs
    num_given = len(function.inputs) - len(captured)
    given, inner = function.inputs[:num_given], function.inputs[num_given:]
    fed = {tensor.op.name for tensor in function.inputs}
    seeds = [rewriting.seeds_of(name, graph) for name in counts]
    owners = [
        seeds[replica_of(place)]
        for place, node in enumerate(graph_def.node)
        if node.name not in fed
    ]
    nodes = [node for node in graph_def.node if node.name not in fed]
    nodes, _ = rewriting.rewritten(nodes, owners, in_function=False)
    functions = rewriting.load(nodes)
    graph_def = tf.compat.v1.GraphDef(versions=graph_def.versions)
    graph_def.node.extend([*rewriting.base_nodes, *nodes])
    used = {name if ":" in name else f"{name}:0" for node in graph_def.node for name in node.input}
    for node in graph_def.node:
        for called in functions_of(node):
            called.name = functions[called.name].name

    def compute(*arguments: object) -> Any:
        into = tf.compat.v1.get_default_graph()
        for loaded in functions.values():
            loaded.add_to_graph(into)
        leaves = tf.nest.flatten(arguments, expand_composites=True)
        feeds = {old.name: new for old, new in zip(given, _tensors(leaves), strict=True)}
        for old, outer in zip(inner, captured, strict=True):
            feeds[old.name] = into.capture(outer, name=old.op.name)
        # TensorFlow refuses inputs that no operation uses.
        feeds = {name: tensor for name, tensor in feeds.items() if name in used}
        names = [tensor.name for tensor in function.outputs]
        outputs = tf.graph_util.import_graph_def(graph_def, feeds, names, name="")
        for old, new in zip(function.outputs, outputs, strict=True):
            new.set_shape(old.shape)
        structure, remaining = function.structured_outputs, iter(outputs)
        flat = tf.nest.flatten(structure, expand_composites=True)
        flat = [None if leaf is None else next(remaining) for leaf in flat]
        return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)

    return make(compute)


def _tensors(leaves: Iterable[object]) -> list[tf.Tensor]:
    return [leaf for leaf in leaves if tf.is_tensor(leaf)]


class _Rewriting:
    """Replaces the operations that draw by seeds, in a graph and its functions."""

    def __init__(self, functions: Iterable[Function], *, compiled: bool) -> None:
        self._compiled = compiled
        self._is_draw = draws if compiled else draws_by_seed
        self._num_draws = 0
        self._functions = {function.signature.name: function for function in functions}
        self._drawing = functions_with(self._is_draw, self._functions.values())
        # Made of the functions above, by their names and whether they are the body of a loop.
        self._made: dict[tuple[str, bool], Function] = {}
        self._written: dict[str, Function] = {}
        self.base_nodes: list[_Node] = []

    def seeds_of(self, count: str, graph: tf.Graph) -> str:
        """Add the seeds of a step to `base_nodes`, and return the name of their tensor."""
        dtype = graph.get_tensor_by_name(f"{count}:0").dtype.as_datatype_enum
        cast = self.node("Cast", f"{_ARGUMENT}/{count}/cast", [count], SrcT=dtype, DstT=_INT64)
        # Not 0, so that a loop's multiple of them is another number.
        first = self._constant(f"{_ARGUMENT}/{count}/first", _hashed("first step"))
        seeds = self.node("AddV2", f"{_ARGUMENT}/{count}/seeds", [cast.name, first.name], T=_INT64)
        self.base_nodes += [cast, first, seeds]
        return str(seeds.name)

    def load(self, nodes: Iterable[_Node]) -> dict[str, Any]:
        """Return all functions that rewritten nodes call, by their names there."""
        # An operation without an entry in `_CALLS` still calls these.
        for function in self._functions.values():
            for node in filter(self._is_draw, function.node_def):
                without_seed(node)
        known = {**self._functions, **self._written}
        known.update((made.signature.name, made) for made in self._made.values())
        called: dict[str, Function] = {}
        pending = list(nodes)
        while pending:
            for name in {call.name for call in functions_of(pending.pop())} - set(called):
                called[name] = known[name]
                pending += known[name].node_def
        library = tf.compat.v1.GraphDef().library
        library.function.extend(called.values())
        loaded: dict[str, Any] = _compat.load_function_def_library(
            library, load_shared_name_suffix=""
        )
        return loaded

    # Bodies

    def rewritten(
        self, nodes: Sequence[_Node], seeds: Sequence[str], *, in_function: bool
    ) -> tuple[list[_Node], dict[str, str]]:
        """Return copies of nodes that draw by the step's seeds, and the new names of outputs."""
        result: list[_Node] = []
        # Loops of TensorFlow 1 have no place for a count of iterations.
        counts_loops = not any(node.op in ("Enter", "RefEnter") for node in nodes)
        renamed: dict[str, str] = {}
        for original, base in zip(nodes, seeds, strict=True):
            node = type(original)()
            node.CopyFrom(original)
            if self._is_draw(node):
                if counts_loops and can_replace(node, compiled=self._compiled):
                    result += self._replace(node, base, renamed, in_function=in_function)
                else:
                    without_seed(node)
            elif counts_loops and node.op in _CALLS and calls(node, self._drawing):
                result += self._hand_on(node, base, in_function=in_function)
            result.append(node)
        for node in result:
            for place, name in enumerate(node.input):
                node.input[place] = renamed.get(name, name)
        return result, renamed

    def _replace(
        self, node: _Node, base: str, renamed: dict[str, str], *, in_function: bool
    ) -> list[_Node]:
        """Turn an operation into its stateless counterpart; return the nodes of its seed."""
        self._num_draws += 1
        given = [node.attr["seed"].i, node.attr["seed2"].i]
        if not any(given):
            given = ["no seeds", self._num_draws]
        constant = self._constant(f"{node.name}/seeds", _hashed(*given))
        inputs = [base, _output(constant.name, "output", in_function=in_function)]
        total = self.node("AddV2", f"{node.name}/seed", inputs, T=_INT64)
        seed = _output(total.name, "z", in_function=in_function)
        attributes = {name: value for name, value in node.attr.items() if not name.startswith("_")}
        for name in ("seed", "seed2"):
            del node.attr[name]
        if node.op in ALIKE and not self._compiled:
            if node.op == "RandomUniformInt":
                node.attr["dtype"].type = node.attr.pop("Tout").type
            node.op, place = ALIKE[node.op]
            node.attr["Tseed"].type = _INT64
            node.input.insert(place, seed)
            return [constant, total]
        written = (COMPILED if self._compiled else WRITTEN)[node.op]
        function = written.function(attributes)
        for child in function.graph.as_graph_def().library.function:
            self._written[child.signature.name] = child
        definition = function.function_def
        self._written[definition.signature.name] = definition
        renamed.update(
            (f"{node.name}:{name}:0", f"{node.name}:output:{place}")
            for place, name in enumerate(written.outputs)
            if in_function
        )
        for name in attributes:
            node.attr.pop(name, None)
        node.op = "PartitionedCall"
        node.input.insert(0, seed)
        node.attr["f"].func.name = definition.signature.name
        for name, arguments in (
            ("Tin", definition.signature.input_arg),
            ("Tout", definition.signature.output_arg),
        ):
            node.attr[name].list.type.extend([argument.type for argument in arguments])
        return [constant, total]

    def _hand_on(self, node: _Node, base: str, *, in_function: bool) -> list[_Node]:
        """Give a call the seeds of the step as its last argument; return the nodes it needs."""
        new: list[_Node] = []
        is_loop = node.op in _LOOPS
        if is_loop:
            # Other seeds than those around the loop, to which its iterations are added.
            factor = self._constant(f"{node.name}/factor", _hashed("loop"))
            inputs = [base, _output(factor.name, "output", in_function=in_function)]
            entry = self.node("Mul", f"{node.name}/seeds", inputs, T=_INT64)
            base = _output(entry.name, "z", in_function=in_function)
            new = [factor, entry]
            if node.attr["output_shapes"].list.shape:
                node.attr["output_shapes"].list.shape.add().dim.add(size=2)
        controls = [name for name in node.input if name.startswith("^")]
        values = [name for name in node.input if not name.startswith("^")]
        del node.input[:]
        node.input.extend([*values, base, *controls])
        node.attr[_CALLS[node.op]].list.type.append(_INT64)
        for attribute, value in node.attr.items():
            for called in [value.func] if value.func.name else value.list.func:
                called.name = self._with_argument(
                    called.name, is_body=is_loop and attribute == "body"
                )
        return new

    def _with_argument(self, name: str, *, is_body: bool) -> str:
        """Return the name of a function that takes the seeds of the step too; make it once.

        The body of a loop also returns the seeds of the next iteration.
        """
        made = f"{name}_{'iterates' if is_body else 'draws'}"
        if (name, is_body) in self._made:
            return made
        function = self._made[name, is_body] = type(self._functions[name])()
        function.CopyFrom(self._functions[name])
        function.signature.name = made
        function.attr.pop("_input_shapes", None)
        function.signature.input_arg.add(name=_ARGUMENT, type=_INT64)
        nodes, renamed = self.rewritten(
            function.node_def, [_ARGUMENT] * len(function.node_def), in_function=True
        )
        for output, source in function.ret.items():
            function.ret[output] = renamed.get(source, source)
        if is_body:
            one = self._constant(f"{_ARGUMENT}_one", [0, 1])
            inputs = [_ARGUMENT, _output(one.name, "output", in_function=True)]
            total = self.node("AddV2", f"{_ARGUMENT}_after", inputs, T=_INT64)
            nodes += [one, total]
            function.signature.output_arg.add(name=f"{_ARGUMENT}_next", type=_INT64)
            function.ret[f"{_ARGUMENT}_next"] = _output(total.name, "z", in_function=True)
        del function.node_def[:]
        function.node_def.extend(nodes)
        return made

    # Nodes

    def node(self, op: str, name: str, inputs: Sequence[str], **types: int) -> _Node:
        """Return a node for arithmetic on seeds.

        It is on the CPU, where a kernel reads its seed: a copy back from a GPU would wait for it.
        """
        device = "" if self._compiled else f"/device:{FIRST_CPU}"
        node = tf.compat.v1.NodeDef(op=op, name=name, device=device)
        node.input.extend(inputs)
        for attribute, dtype in types.items():
            node.attr[attribute].type = dtype
        return node

    def _constant(self, name: str, value: Sequence[int], dtype: tf.DType = tf.int64) -> _Node:
        node = self.node("Const", name, [], dtype=dtype.as_datatype_enum)
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
        return node


def _output(name: str, output: str, *, in_function: bool) -> str:
    """Return the name of a node's output, as an input of another node."""
    return f"{name}:{output}:0" if in_function else name


def _hashed(*seeds: object) -> list[int]:
    """Return two odd int64 numbers that differ for different seeds."""
    digest = hashlib.sha256(repr(seeds).encode()).digest()
    return [
        int.from_bytes(digest[place : place + 8], "little", signed=True) | 1 for place in (0, 8)
    ]
