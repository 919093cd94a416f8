"""A policy that saves more never recomputes more: programs under pairs of policies, one wider than the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import assert_same, module, rand
from torch import Tensor, nn

from benchmarks.measure import OpCounter, count_ops, held_bytes
from remat import checkpoint_name, policies, remat

# Operations that make no value of their own, or that copy a saved value when it is restored.
NO_RECOMPUTE = Counter(
    f"aten.{name}"
    for name in (
        *("t", "view", "transpose", "detach", "expand", "alias", "select", "slice", "_unsafe_view", "as_strided"),
        *("unsqueeze", "squeeze", "split", "permute", "empty", "empty_strided", "set_", "fill_", "clone", "copy_"),
    )
)
pytestmark = pytest.mark.filterwarnings("ignore:The policy")
Program = Callable[..., Tensor]  # takes a policy for regions inside, and tensors


def recomputed(program: Program, policy: Any, args: list[Tensor]) -> Counter[str]:
    """The operations of a backward, whose gradients are checked against the plain function."""
    out = remat(lambda *args: program(policy, *args), policy=policy)(*args)
    with OpCounter() as counter:
        found = torch.autograd.grad(out.sum(), args, allow_unused=True)
    assert_same(found, torch.autograd.grad(program(None, *args).sum(), args, allow_unused=True))
    return Counter({name: count for name, count in counter.counts.items() if name not in NO_RECOMPUTE})


def ops(*names: str) -> policies.Policy:
    return policies.save_ops(*(f"aten.{name}" for name in names))


NARROW = [
    policies.save_matmuls,
    policies.save_only_these_names("a", "b"),
    policies.save_matmuls | policies.save_only_these_names("b"),
    policies.save_if(lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default),
    ops("tanh", "gelu", "_softmax"),
    ops("max", "native_layer_norm", "sin"),
]
MORE = {
    "products": ops("mul"),
    "sums": ops("add"),
    "sines": ops("sin", "exp"),
    "softmax and copies": ops("_softmax", "clone"),
    "several results": ops("max", "native_layer_norm"),
    "names": policies.save_only_these_names("c"),
    "attention": policies.save_attention,
    "all but names": policies.save_anything_except_these_names("c"),
}


# --- programs ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block whose parts may be regions."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(0, 1) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        scores = checkpoint_name((q @ k.transpose(-1, -2)) / 2, "a").softmax(-1)
        return self.out(checkpoint_name(scores @ v, "b").transpose(0, 1).flatten(-2))

    def feed(self, x: Tensor) -> Tensor:
        return self.down(checkpoint_name(F.gelu(self.up(self.norms[1](x))), "c"))


BLOCK = module(Block)


def transformer(policy: Any, x: Tensor) -> Tensor:
    for _ in range(2):
        x = x + BLOCK.attend(x)
        x = x + BLOCK.feed(x)
    return x


def transformer_of_regions(policy: Any, x: Tensor) -> Tensor:
    attend, feed = remat(BLOCK.attend, policy=policy), remat(BLOCK.feed)
    for _ in range(2):
        x = x + attend(x)
        x = x + feed(x)
    return x


def dead_write(policy: Any, x: Tensor, w: Tensor) -> Tensor:
    a = x @ x
    b = a + a
    a.sin_()  # it isn't read
    e = (b * 0.1).exp()
    return e.sin() @ (e @ b)


def dead_region(policy: Any, x: Tensor, w: Tensor) -> Tensor:
    """Values that are computed but not needed keep the values that they were computed from alive."""

    def inner(x: Tensor, y: Tensor) -> Tensor:
        found = [x.sin(), y.sin()]
        found.append(found[1] * found[0])
        found.append(found[0].sin())
        found += [found[1] + found[1], found[0] @ found[3], found[3].sin()]
        return found[-1].sin() @ found[-1]

    s = w.softmax(-1)
    p = s * s
    q = s.t() * s.t()
    n = F.layer_norm(q, (4,))
    m = n @ q
    r = remat(inner)(m, n)
    n = F.layer_norm(r, (4,))
    dead = [p, n @ n, n.t()]
    h = q.max(0, keepdim=True).values.expand(4, 4) * q
    return (h.sin() @ h) * len(dead)


SQUARE = [rand(4, 4, seed=i) for i in range(2)]
PROGRAMS: dict[str, tuple[Program, list[Tensor]]] = {
    "transformer": (transformer, [rand(5, 8)]),
    "transformer of regions": (transformer_of_regions, [rand(5, 8)]),
    "dead write": (dead_write, SQUARE),
    "dead region": (dead_region, SQUARE),
}


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_wider_policy_recomputes_no_more(program: str, more: str) -> None:
    fn, args = PROGRAMS[program]
    first = list(PROGRAMS).index(program) + list(MORE).index(more)
    for narrow in (None, *NARROW)[first % 2 :: 2]:  # half of them
        before = recomputed(fn, narrow, args)
        wide = MORE[more] if narrow is None else narrow | MORE[more]
        assert not recomputed(fn, wide, args) - before, f"{narrow!r} -> {wide!r}"


WIDTHS = [policies.save_matmuls, policies.save_matmuls | ops("mul")]


def test_operands_of_an_unused_write_are_saved_like_others() -> None:
    args = [rand(64, 64), rand(64, 64, seed=1)]
    plain = lambda *args: dead_write(None, *args)
    held = [held_bytes(remat(plain, policy=policy), *args) for policy in WIDTHS]
    assert held[0] < held[1] < held_bytes(plain, *args)
    out = plain(*args).sum()
    derivative = count_ops(torch.autograd.grad, out, args[0])
    assert all(recomputed(dead_write, policy, args)["aten.mm"] == derivative["aten.mm"] for policy in WIDTHS)


@pytest.mark.parametrize("policy", [*WIDTHS, policies.everything_saveable], ids=str)
def test_values_without_gradients_are_restored(policy: Any) -> None:
    """User code may read them unseen, so a recompute makes them under each of the policies."""

    def fn(inside: Any, x: Tensor, w: Tensor) -> Tensor:
        constant = torch.ones_like(x)
        constant @ constant * 0.3
        return w[[2, 0, 0]].sin().exp()

    assert recomputed(fn, policy, [rand(3, 3), rand(3, 3)])["aten.mm"] == 0
