"""The graphs that AOT autograd makes of compiled functions: their products, what they hand over, their peak."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """Of each kind the last one."""

    forward: Any = None
    backward: Any = None
    inference: Any = None  # where nothing requires grad outside
    all: list[fx.GraphModule] = field(default_factory=list)

    def backend(self) -> Callable:
        """For ``torch.compile``; it partitions as inductor does, and runs the graphs as they are."""

        def keep(kind: str) -> Callable:
            def compiler(graph: fx.GraphModule, inputs: Any) -> Callable:
                setattr(self, kind, graph)
                self.all.append(graph)
                return graph.forward

            return compiler

        return aot_autograd(
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            inference_compiler=keep("inference"),
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
    """How many calls of these operators there are."""
    return sum(node.target in ops for node in graph.graph.nodes)


def _tensors(node: fx.Node) -> list[Tensor]:
    return [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]


def _storages(node: fx.Node) -> dict[int, int]:
    """Ids of storages, and their bytes."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(node)}


def handed_over(backward: fx.GraphModule) -> int:
    """Bytes that the backward gets of the forward, beyond arguments and cotangents."""
    found: dict[int, int] = {}
    own: set[int] = set()
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name.startswith(("primals", "tangents")):
            own.update(_storages(node))
        else:
            found.update(_storages(node))
    return sum(size for key, size in found.items() if key not in own)


def peak(graph: fx.GraphModule) -> int:
    """The most bytes of the graph's own storages that live at once, if it runs in its order."""
    nodes = list(graph.graph.nodes)
    sizes: dict[int, int] = {}
    born: dict[int, int] = {}
    dies: dict[int, int] = {}
    given: set[int] = set()
    for i, node in enumerate(nodes):
        for key, size in _storages(node).items():
            sizes[key] = size
            born.setdefault(key, i)
            if node.op == "placeholder":
                given.add(key)
        for key in [*_storages(node), *(key for arg in node.all_input_nodes for key in _storages(arg))]:
            dies[key] = i
    live = most = 0
    for i, node in enumerate(nodes):
        live += sum(sizes[key] for key in born if born[key] == i and key not in given)
        most = max(most, live)
        if node.op != "output":
            live -= sum(sizes[key] for key in dies if dies[key] == i and key not in given)
    return most


class Allocations:
    """The bytes that inductor's code for the CPU holds at once. Compile within, as the code takes its allocator."""

    def __init__(self) -> None:
        self.live = self.most = 0

    def __enter__(self) -> Allocations:
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
