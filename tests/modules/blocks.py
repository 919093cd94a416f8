"""A model of blocks that record their runs, and the ways to make a module a region."""

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch
from cases import assert_same, rand
from torch import Tensor, nn

import remat.nn
from benchmarks.measure import held_bytes
from remat import checkpoint_name, is_recomputing

RUNS: list[bool] = []


class Base(nn.Module):
    pass


class Block(Base):
    """Records its runs."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | float = 0.0) -> Tensor:
        """Works."""
        RUNS.append(is_recomputing())
        return (self.down(checkpoint_name(self.up(x).tanh(), "hidden").sin() * scale) + shift).exp().cos()


class Quiet(Block):
    """Records nothing, so that compilers accept it."""

    def forward(self, x):  # type: ignore  # fx can't pickle annotations that are strings
        return self.down(self.up(x).tanh().sin()).exp().cos()


class Replaced(nn.Module):
    """A base that replaces `forward` of each subclass, as a base class in transformers does."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.forward = functools.wraps(f := cls.forward)(lambda self, *args, **kwargs: f(self, *args, **kwargs))


class OfReplaced(Block, Replaced):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Model(nn.Module):
    def __init__(self, block: type = Block, wrap: Callable[[Any], Any] = lambda module: module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(wrap(block()) for _ in range(4))
        self.tail = nn.Sequential(nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.tail(x)


def in_place(module: Any) -> Any:
    return remat.nn.apply(module, lambda name, _: name == "")


WAYS: dict[str, Callable[[Any], Any]] = {
    "in place": in_place,
    "second": remat.remat,
    "second of in place": lambda module: remat.remat(in_place(module)),
    "in place of second": lambda module: in_place(remat.remat(module)),
    "second of second": lambda module: remat.remat(remat.remat(module)),
}


def made(make: Callable[..., Any] = Model, *args: Any) -> Any:
    """The same module in each call."""
    torch.manual_seed(0)
    return make(*args).double()


X = rand(5, 4, grad=False)
ROWS = 64
ROW = ROWS * 4 * 8  # bytes of the value passed from block to block
INSIDE = 5 * ROW  # of a block: results of tanh and sin, which are twice as wide, and of exp


def kept(module: nn.Module) -> int:
    return held_bytes(module, rand(ROWS, 4, grad=False))


def step(model: nn.Module, *args: Any) -> list[Tensor | None]:
    """The gradients of all parameters; each call draws the same random numbers."""
    torch.manual_seed(3)
    for p in model.parameters():
        p.grad = None
    RUNS.clear()
    model(*(args or (X,))).square().sum().backward()
    return [p.grad for p in model.parameters()]


def check(model: nn.Module, plain: nn.Module, runs: list[bool] | None = None, *args: Any) -> None:
    """Check that one step gives the same gradients and buffers, and that the runs of the blocks are `runs`."""
    expected = step(plain, *args)
    actual = step(model, *args)
    assert runs is None or runs == RUNS
    assert_same(actual, expected)
    assert_same(list(model.buffers()), list(plain.buffers()))


AGAIN = [False, True]
ALL = [False] * 4 + [True] * 4  # the runs of the blocks of a model


def replicated(model: Any) -> Any:
    """Copy a model as `DataParallel` does for each device, with the same parameters."""
    replica = model._replicate_for_data_parallel()
    replica._parameters = dict(model._parameters)
    replica._modules = {n: None if m is None else replicated(m) for n, m in model._modules.items()}
    return replica


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "old pickle": lambda model: pickle.loads(pickle.dumps(model, protocol=2)),
    "replica": replicated,
}
