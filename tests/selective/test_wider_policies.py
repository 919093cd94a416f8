"""A policy that saves more never recomputes more: programs under pairs of policies, one wider than the other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import rand, same_bits
from torch import Tensor, nn

from benchmarks.measure import OpCounter, held_bytes
from remat import checkpoint_name, policies, remat

# Operations that make no value of their own, or that copy a saved value when it is restored.
NO_RECOMPUTE = Counter(
    f"aten.{name}"
    for name in (
        *("t", "view", "transpose", "detach", "expand", "alias", "select", "slice", "_unsafe_view", "as_strided"),
        *("unsqueeze", "squeeze", "split", "permute", "empty", "empty_strided", "set_", "fill_", "clone", "copy_"),
    )
)
Program = Callable[..., Tensor]  # takes a policy for regions inside, and tensors


def recomputed(program: Program, policy: Any, args: list[Tensor]) -> Counter[str]:
    """The operations of a backward, whose gradients are checked against the plain function."""
    expected = torch.autograd.grad(program(None, *args).sum(), args, allow_unused=True)
    out = remat(lambda *args: program(policy, *args), policy=policy)(*args)
    with OpCounter() as counter:
        found = torch.autograd.grad(out.sum(), args, allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or same_bits(a, b)
    return Counter({name: count for name, count in counter.counts.items() if name not in NO_RECOMPUTE})


def assert_no_more(program: Program, narrow: Any, wide: Any, args: list[Tensor]) -> None:
    before, now = recomputed(program, narrow, args), recomputed(program, wide, args)
    assert not now - before, f"{narrow!r} -> {wide!r}"


def ops(*names: str) -> policies.Policy:
    return policies.save_ops(*(f"aten.{name}" for name in names))


NARROW = {
    "matmuls": policies.save_matmuls,
    "names": policies.save_only_these_names("a", "b"),
    "matmuls and names": policies.save_matmuls | policies.save_only_these_names("b"),
    "a predicate": policies.save_if(lambda ctx, op, *args, **kwargs: op is torch.ops.aten.mm.default),
    "activations": ops("tanh", "gelu", "_softmax"),
    "several results": ops("max", "native_layer_norm", "sin"),
}
MORE = {
    "collectives": policies.save_collectives,
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


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    BLOCK = Block().double()


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


def several_results(policy: Any, x: Tensor, w: Tensor) -> Tensor:
    h = (x.max(0, keepdim=True).values * x).sin() @ x
    return h.sin() @ h


def written_part(policy: Any, x: Tensor, w: Tensor) -> Tensor:
    def inner(x: Tensor, w: Tensor) -> Tensor:
        h = (x @ w).clone()
        h[0] = w[1]
        return h.sin() @ h

    y = remat(inner, policy=policies.save_only_these_names("a"))(x.sin(), w.sin())
    return (y + x).sin() @ y.t()


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


PROGRAMS: dict[str, tuple[Program, tuple[int, ...]]] = {
    "transformer": (transformer, (5, 8)),
    "transformer of regions": (transformer_of_regions, (5, 8)),
    "dead write": (dead_write, (4, 4)),
    "several results": (several_results, (4, 4)),
    "written part": (written_part, (4, 4)),
    "dead region": (dead_region, (4, 4)),
}


def arguments(program: str) -> list[Tensor]:
    shape = PROGRAMS[program][1]
    return [rand(*shape, seed=i) for i in range(1 if program.startswith("transformer") else 2)]


def drawn(seed: int, length: int, nested: bool) -> Program:
    """A random program of a few tensors, with writes, names, views and regions."""
    draw = random.Random(seed)
    steps: list[tuple] = []
    for _ in range(length):
        i, j = (draw.choice([-1, -1, -1, -2, -3, draw.randrange(-8, 0)]) for _ in range(2))
        kind = draw.choice(["mm"] * 3 + ["unary"] * 3 + ["binary"] * 2 + ["write", "name", "view", "region"])
        if kind == "region":
            inside = drawn(draw.randrange(10**6), 5, False) if nested else None
            steps.append((kind, inside, draw.choice(["none", "same", "names"])))
        else:
            steps.append((kind, i, j, draw.randrange(6)))
    return lambda policy, *args: run(steps, policy, list(args))


UNARY = [torch.sin, torch.tanh, lambda t: (t * 0.1).exp(), lambda t: t.softmax(-1), lambda t: F.layer_norm(t, (4,))]
UNARY.append(lambda t: t.max(0, keepdim=True).values * t)


def run(steps: list[tuple], policy: Any, found: list[Tensor]) -> Tensor:
    for kind, *rest in steps:
        if kind == "region":
            inside, which = rest
            if inside is not None:
                own = {"none": None, "same": policy, "names": policies.save_only_these_names("a")}[which]
                region = remat(lambda x, y, inside=inside: inside(None, x.sin(), y.sin()), policy=own)
                found.append(region(found[-1], found[-2]))
            continue
        i, j, which = rest
        a, b = (found[max(k, -len(found))] for k in (i, j))
        if kind == "mm":
            found.append(a @ b)
        elif kind == "unary":
            found.append(UNARY[which](a))
        elif kind == "binary":
            found.append(a + b if which % 2 else a * b)
        elif kind == "view":
            found.append(a.t())
        elif kind == "name":
            checkpoint_name(a, "abc"[which % 3])
        else:
            copy = a.clone()
            copy[0] = b[1]
            found.append(copy)
    return found[-1].sin() @ found[-1]


# --- tests ------------------------------------------------------------------------------------------------------------

quiet = pytest.mark.filterwarnings("ignore:The policy")


@quiet
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_wider_policy_recomputes_no_more(program: str, more: str) -> None:
    args = arguments(program)
    for narrow in NARROW.values():
        assert_no_more(PROGRAMS[program][0], narrow, narrow | MORE[more], args)


@quiet
@pytest.mark.parametrize("seed", range(60))
def test_a_wider_policy_recomputes_no_more_of_random_programs(seed: int) -> None:
    draw = random.Random(seed)
    program, args = drawn(seed, 12, nested=seed % 2 == 0), [rand(4, 4, seed=i) for i in range(2)]
    narrow = NARROW[draw.choice(sorted(NARROW))]
    assert_no_more(program, None, narrow, args)
    for more in draw.sample(sorted(MORE), 3):
        assert_no_more(program, narrow, narrow | MORE[more], args)


@quiet
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_call_recomputes_the_same(program: str) -> None:
    args = arguments(program)
    for policy in (policies.save_matmuls, policies.save_matmuls | policies.save_collectives):
        counts = [recomputed(PROGRAMS[program][0], policy, args) for _ in range(8)]
        assert counts == counts[:1] * 8


def test_operands_of_an_unused_write_are_saved_like_others() -> None:
    x, w = rand(64, 64), rand(64, 64)
    held = [held_bytes(remat(lambda x, w: dead_write(None, x, w), policy=policy), x, w) for policy in WIDTHS]
    assert held[0] < held[1] < held_bytes(lambda x, w: dead_write(None, x, w), x, w)
    out = dead_write(None, x, w).sum()
    with OpCounter() as plain:
        torch.autograd.grad(out, x)
    for policy in WIDTHS:
        assert recomputed(dead_write, policy, [x, w])["aten.mm"] == plain["aten.mm"]


@pytest.mark.parametrize("policy", [policies.save_matmuls | ops("mul"), policies.everything_saveable], ids=str)
def test_values_without_gradients(policy: Any) -> None:
    """User code may read it unseen, so a recompute restores it from saved values under each of the policies."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        constant = torch.ones_like(x)
        constant @ constant * 0.3
        return w[[2, 0, 0]].sin().exp()

    assert recomputed(lambda _, *args: fn(*args), policies.save_matmuls, [rand(3, 3), rand(3, 3)])["aten.mm"] == 0
    assert recomputed(lambda _, *args: fn(*args), policy, [rand(3, 3), rand(3, 3)])["aten.mm"] == 0


WIDTHS = [policies.save_matmuls, policies.save_matmuls | ops("mul")]
