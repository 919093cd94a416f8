"""The programs that `test_distributed.py` runs in two processes: a small transformer under every kind of parallelism.

Each program trains it in several of the `WAYS` to checkpoint its blocks, with a process group for each. The result of a
program, or its error, is in its own files.
"""

import copy
import functools
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import remat.nn
from benchmarks.measure import OpCounter, PeakMemory, gc_disabled
from remat import compat, policies

RANKS, STEPS, VOCABULARY, LENGTH, HEADS = 2, 2, 32, 6, 2
CPU = torch.device("cpu")
aten, functional = torch.ops.aten, torch.ops._c10d_functional
PRODUCTS = [aten.mm.default, aten.addmm.default, aten.bmm.default]
COLLECTIVES = [
    functional.all_reduce.default,
    functional.all_gather_into_tensor.default,
    functional.reduce_scatter_tensor.default,
    functional.wait_tensor.default,
]
# Names of operators of torch.distributed that send nothing.
SILENT = "wait_tensor", "_wrap_tensor_autograd"


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1] // HEADS  # a process may have some of the heads
        each = [layer(x).unflatten(-1, (-1, size)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        return self.out(F.scaled_dot_product_attention(*each, is_causal=True).transpose(1, 2).flatten(-2))


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, unused: bool) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.perceptron = nn.LayerNorm(width), Perceptron(width)
        self.dropout = nn.Dropout(0.1)
        if unused:
            self.unused = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.perceptron(self.norm2(x)))


class Transformer(nn.Module):
    """In a stage of a pipeline the parts that belong to other stages are None."""

    def __init__(self, width: int = 16, blocks: int = 2, unused: bool = False) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleDict({str(i): Block(width, unused) for i in range(blocks)})
        self.norm: nn.Module | None = nn.LayerNorm(width)
        self.head: nn.Module | None = nn.Linear(width, VOCABULARY, bias=False)
        self.call: Callable = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.embedding else x
        for block in self.blocks.values():
            x = self.call(block, x)
        x = self.norm(x) if self.norm else x
        return self.head(x) if self.head else x


class Way(NamedTuple):
    """`change` changes the model before (0), between (1) or after (2) the program's changes; `call` calls a block."""

    change: Callable[[nn.Module], Any] | None = None
    call: Callable | None = None
    place: int = 1


def selective(ops: list) -> Callable:
    return functools.partial(create_selective_checkpoint_contexts, ops)


def by_torch(**options: Any) -> Callable[[nn.Module], None]:
    wrap = functools.partial(torchs.checkpoint_wrapper, checkpoint_impl=torchs.CheckpointImpl.NO_REENTRANT, **options)
    return lambda model: torchs.apply_activation_checkpointing(model, wrap, lambda module: isinstance(module, Block))


def by_regions(policy: Any = None) -> Callable[[nn.Module], Any]:
    return lambda model: remat.nn.apply(model, Block, policy=policy)


def torch_call(block: Callable, x: Tensor, **options: Any) -> Tensor:
    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, **options)


save_products = policies.save_ops(*PRODUCTS)
WAYS = {
    "plain": Way(),
    "torch": Way(by_torch()),
    "torch, products": Way(by_torch(context_fn=selective(PRODUCTS))),
    "torch, collectives": Way(by_torch(context_fn=selective(COLLECTIVES))),
    "torch, called": Way(call=torch_call),
    "torch, called, products": Way(call=functools.partial(torch_call, context_fn=selective(PRODUCTS))),
    "apply": Way(by_regions()),
    "apply, products": Way(by_regions(save_products)),
    "apply, collectives": Way(by_regions(policies.save_collectives)),
    "apply first": Way(by_regions(), place=0),
    "apply last": Way(by_regions(), place=2),
    "called": Way(call=compat.checkpoint),
    "called, products": Way(call=functools.partial(compat.checkpoint, policy=save_products)),
}
USUAL = "plain", "torch", "torch, products", "apply", "apply, products"
CALLED = "torch, called", "torch, called, products", "called", "called, products"


@dataclass
class Costs:
    """Of the last step: bytes saved for the backward, left after it and at the peak, products, collectives by operator.

    The peak is the minimum of all steps: a thread of gloo may hold the last result of a collective briefly.
    """

    kept: int
    left: int
    peak: int
    products: int
    collectives: Counter[str]


@dataclass
class Result:
    """The result of one process."""

    losses: list[Tensor]
    grads: dict[str, Tensor]
    costs: Costs
    keys: list[str] = field(default_factory=list)  # in a checkpoint of the model and of its optimizer


LIBRARIES = "c10d", "_c10d_functional"


class Meter(PeakMemory, OpCounter):
    """Measures memory and counts operations."""

    def after(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        if func.namespace in LIBRARIES:
            time.sleep(0.0005)  # lets the thread of gloo finish
        PeakMemory.after(self, func, args, kwargs, result)
        OpCounter.after(self, func, args, kwargs, result)

    def settled(self) -> int:
        """The live bytes; a thread of gloo may hold the last result of a collective briefly, so take the minimum."""
        found = [self.live]
        for _ in range(10):
            time.sleep(0.001)
            found.append(self.live)
        return min(found)

    def costs(self, kept: int, peak: int) -> Costs:
        sent = {
            operator: times
            for name, times in self.counts.items()
            for library, _, operator in [name.partition(".")]
            if library in LIBRARIES and operator not in SILENT
        }
        products = sum(self[f"aten.{name}"] for name in ("mm", "addmm", "bmm"))
        return Costs(kept, self.settled(), peak, products, Counter(sent))


def batch(number: int, rank: int, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def gradients(*modules: nn.Module) -> dict[str, Tensor]:
    """The local gradients of this process."""
    found = {}
    for i, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if (grad := parameter.grad) is not None:
                name = name.replace("_checkpoint_wrapped_module.", "")
                found[f"{i}.{name}"] = local(grad)
    return found


def train(model: nn.Module, same: bool = False, micro: int = 1) -> Result:
    """Steps of `micro` batches, if `same` equal in both processes; gradients are reduced after the last batch."""
    optimizer, losses, kept, peaks = torch.optim.SGD(model.parameters(), 0.1), [], 0, []
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.step()
        optimizer.zero_grad()
        with Meter() as meter:
            for i in range(micro):
                tokens, targets = batch(step * micro + i, 0 if same else dist.get_rank())
                with model.no_sync() if i < micro - 1 else nullcontext():
                    loss = loss_of(model(tokens), targets)
                    losses.append(loss.detach())
                    kept = meter.settled()
                    loss.backward()
                    del loss
        peaks.append(meter.peak)
    grads, (state, of_optimizer) = gradients(model), get_state_dict(model, optimizer)
    keys = [*state, *of_optimizer["param_groups"][0]["params"]]
    return Result(losses, grads, meter.costs(kept, min(peaks)), keys)


Change = Callable[[Any], Any]


@dataclass
class Program:
    """`before` runs before the blocks are checkpointed, as torch's tensor parallelism must, `after` runs afterwards."""

    before: Change = lambda model: model
    after: Change = lambda model: model
    kind: dict[str, Any] = field(default_factory=dict)
    train: Callable[..., Result] = train
    ways: Sequence[str] = USUAL
    products_of: str | None = None  # the program to compare with, if torch's selective checkpoint fails here

    def make(self, way: Way) -> Any:
        torch.manual_seed(0)
        model: Any = Transformer(**self.kind)
        model.call = way.call or model.call
        changes = [self.before, self.after]
        if way.change:
            changes.insert(way.place, way.change)
        for change in changes:
            model = change(model) or model
        return model

    def run(self, way: str) -> Result:
        return self.train(self.make(WAYS[way]))


def mesh() -> Any:
    return init_device_mesh("cpu", (RANKS,))


def ddp(**options: Any) -> Change:
    return lambda model: DistributedDataParallel(model, **options)


def shard(*inside: type, blocks: bool = True, **options: Any) -> Change:
    """FSDP2 whose units are modules of these types in a block, and each block if `blocks`."""

    def change(model: Transformer) -> None:
        on = mesh()
        for block in model.blocks.values():
            units = [module for module in block.modules() if isinstance(module, inside)]
            for unit in [*units, block] if blocks else units:
                fully_shard(unit, mesh=on, **options)
        fully_shard(model, mesh=on, **options)

    return change


def shard1(*units: type, **options: Any) -> Change:
    """FSDP1 with modules of these types as units."""
    chosen = ModuleWrapPolicy(set(units))
    return lambda model: FullyShardedDataParallel(model, auto_wrap_policy=chosen, device_id=CPU, **options)


def parallelized(inputs: Any, outputs: Any) -> dict[str, Any]:
    """The plan for a block: the heads and the hidden units of the perceptron are divided."""
    return {
        "attention": inputs,
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(output_layouts=outputs),
        "perceptron": inputs,
        "perceptron.up": ColwiseParallel(),
        "perceptron.down": RowwiseParallel(output_layouts=outputs),
    }


def sequence_parallel(model: Transformer) -> None:
    on = mesh()
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, on, ends)
    inputs = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    norms = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    for block in model.blocks.values():
        parallelize_module(block, on, {**norms, **parallelized(inputs, Shard(1))})


def pipeline(kind: Any, each: int = 1) -> Callable[[Any], Result]:
    """A schedule with `each` stages per process. Forwards and backwards interleave, so saved bytes aren't measured."""

    def train(model: Transformer) -> Result:
        count, here = RANKS * each, range(dist.get_rank(), RANKS * each, RANKS)
        modules = [stage_of(model, i, count) for i in here]
        stages = [PipelineStage(module, i, count, CPU) for module, i in zip(modules, here)]
        schedule = kind(stages[0] if each == 1 else stages, 4, loss_fn=loss_of)
        losses: list[Tensor] = []
        peaks = []
        for step in range(STEPS):
            torch.manual_seed(step)
            for module in modules:
                module.zero_grad()
            tokens, targets = batch(step, 0, size=8)
            inputs = [tokens.contiguous()] if 0 in here else []  # torch 2.11 requires this
            outputs = {"target": targets, "losses": losses} if count - 1 in here else {}
            with Meter() as meter:
                schedule.step(*inputs, **outputs)
            peaks.append(meter.peak)
        return Result([loss.detach() for loss in losses], gradients(*modules), meter.costs(0, min(peaks)))

    return train


def stage_of(model: Transformer, number: int, count: int) -> nn.Module:
    """One of `count` equally large parts of the model."""
    part = copy.deepcopy(model)
    size = len(model.blocks) // count
    for i in range(len(model.blocks)):
        if i // size != number:
            del part.blocks[str(i)]
    if number > 0:
        part.embedding = None
    if number < count - 1:
        part.norm = part.head = None
    return part


half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
half1 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
layers = nn.Linear, nn.LayerNorm
together = functools.partial(train, same=True)

WITHOUT_SELECTIVE = tuple(way for way in USUAL if way != "torch, products")
COLLECTIVE = "torch, collectives", "apply, collectives"
PROGRAMS = {
    "DDP": Program(after=ddp(), ways=(*USUAL, "apply last")),
    "DDP, static graph": Program(after=ddp(static_graph=True)),
    "DDP, unused parameters": Program(after=ddp(find_unused_parameters=True), kind={"unused": True}),
    "DDP, no_sync": Program(after=ddp(), train=functools.partial(train, micro=2)),
    "FSDP2": Program(after=shard(), ways=(*USUAL, *CALLED, "apply last")),
    "FSDP2, bfloat16": Program(after=shard(mp_policy=half)),
    "FSDP2, layers": Program(after=shard(*layers, blocks=False), ways=WITHOUT_SELECTIVE, products_of="FSDP2"),
    "FSDP2, layers and blocks, not resharded, bfloat16": Program(
        after=shard(*layers, reshard_after_forward=False, mp_policy=half),
        ways=WITHOUT_SELECTIVE,
        products_of="FSDP2, bfloat16",
    ),
    "FSDP1": Program(after=shard1(Block), ways=(*USUAL, *CALLED, "apply last")),
    "FSDP1, original parameters, bfloat16": Program(after=shard1(Block, use_orig_params=True, mixed_precision=half1)),
    "FSDP1, layers": Program(after=shard1(*layers), ways=WITHOUT_SELECTIVE, products_of="FSDP1"),
    "sequence parallel": Program(before=sequence_parallel, train=together, ways=(*USUAL, *COLLECTIVE, "apply first")),
    "pipeline, 1F1B": Program(train=pipeline(Schedule1F1B)),
    "pipeline, zero bubble": Program(
        kind={"blocks": 4}, train=pipeline(ScheduleInterleavedZeroBubble, each=2), ways=WITHOUT_SELECTIVE
    ),
}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run(rank: int, folder: str, port: int) -> None:
    """Run all programs in all of their ways, in one of the processes."""
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port)
    with gc_disabled():
        for name, program in PROGRAMS.items():
            for way in program.ways:
                outcome = attempt(rank, dist.PrefixStore(f"{name}/{way}", store), program, way)
                torch.save(outcome, f"{folder}/{name}, {way}, {rank}")


def attempt(rank: int, store: Any, program: Program, way: str) -> Result | str:
    """The result of a program, or its traceback. If it fails in one process, it soon fails in the other."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=15))
    try:
        return program.run(way)
    except Exception:
        return traceback.format_exc()
    finally:
        dist.destroy_process_group()


def main(folder: str) -> None:
    """Run all programs, in forked processes that needn't import torch again."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.start_processes(run, (folder, store.port), RANKS, start_method="fork")
