"""The graphs that AOT autograd makes of compiled functions: their products, residuals and peak."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}


@dataclass
class Graphs:
    """The last graph of each kind."""

    forward: Any = None
    backward: Any = None
    inference: Any = None  # if no argument requires grad

    def backend(self) -> Callable:
        """A backend for ``torch.compile`` that partitions as inductor does, and runs the graphs unchanged."""

        record = lambda kind: lambda graph, inputs: setattr(self, kind, graph) or graph.forward
        return aot_autograd(
            fw_compiler=record("forward"),
            bw_compiler=record("backward"),
            inference_compiler=record("inference"),
            partition_fn=min_cut_rematerialization_partition,
        )


def graphs_of(f: Callable, run: Callable, *args: Any, **options: Any) -> tuple[Graphs, Any]:
    """The graphs of ``run(compiled f, *args)``, and its result."""
    torch._dynamo.reset()
    graphs = Graphs()
    options.setdefault("fullgraph", True)
    result = run(torch.compile(f, backend=graphs.backend(), **options), *args)
    return graphs, result


def count(graph: fx.GraphModule, ops: Any = PRODUCTS) -> int:
    """The number of calls of these operators."""
    return sum(node.target in ops for node in graph.graph.nodes)


def _storages(node: fx.Node) -> dict[int, int]:
    """The storages of a node's tensors: their bytes by id."""
    storages = [t.untyped_storage() for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


def handed_over(backward: fx.GraphModule) -> int:
    """The bytes of the backward's inputs, without arguments and cotangents: the residuals of the forward."""
    found: dict[int, int] = {}
    own: set[int] = set()
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name.startswith(("primals", "tangents")):
            own.update(_storages(node))
        else:
            found.update(_storages(node))
    return sum(size for key, size in found.items() if key not in own)


def peak(graph: fx.GraphModule) -> int:
    """The most bytes of the graph's own storages that are alive at once, if its nodes run in order."""
    sizes: dict[int, int] = {}  # of the graph's own storages
    dies: dict[int, fx.Node] = {}
    inputs: set[int] = set()
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            inputs |= set(_storages(node))
        for read in [node, *node.all_input_nodes]:
            sizes |= {key: size for key, size in _storages(read).items() if key not in inputs}
            dies |= dict.fromkeys(_storages(read), node)
    live, most, born = 0, 0, set[int]()
    for node in graph.graph.nodes:
        new = {key for key in _storages(node) if key in sizes} - born
        born |= new
        live += sum(sizes[key] for key in new)
        most = max(most, live)
        if node.op != "output":
            live -= sum(sizes[key] for key in sizes if dies[key] is node)
    return most


class Allocations:
    """Counts the bytes that inductor's code for the CPU allocates, if the code is compiled inside this context."""

    def __init__(self) -> None:
        self.live = self.most = 0

    def __enter__(self) -> "Allocations":
        self._own = torch._C._dynamo.guards._empty_strided_cpu
        torch._C._dynamo.guards._empty_strided_cpu = self._allocate
        return self

    def __exit__(self, *exception: Any) -> None:
        torch._C._dynamo.guards._empty_strided_cpu = self._own

    def _allocate(self, *args: Any) -> Tensor:
        tensor = self._own(*args)
        size = tensor.untyped_storage().nbytes()
        self.live += size
        self.most = max(self.most, self.live)
        weakref.finalize(tensor, self._free, size)
        return tensor

    def _free(self, size: int) -> None:
        self.live -= size
