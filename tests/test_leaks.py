"""Random programs leave nothing behind: live tensors, and bytes that are allocated, after many runs of each."""

import ctypes
import gc
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from random_programs import compare
from random_programs.compare import observe, surrounded
from random_programs.writer import source

from remat import policies, remat

CALLS, PARTS = 100, 5
# Programs that run quickly, under all kinds of transforms, and leak nothing without regions: torch's `linearize` does.
SEEDS = [
    16, 27, 29, 35, 36, 38, 41, 44, 46, 56, 57, 59, 68, 78, 79, 82, 86, 87, 92, 93, 94, 106, 110, 112, 113,
    114, 117, 121, 130, 131, 143, 147, 148, 151, 159, 163, 166, 168, 170, 173, 175, 176, 182, 186, 187, 197,
    201, 202, 203, 212,
]  # fmt: skip


class Allocated(ctypes.Structure):
    """What glibc's `mallinfo2` returns: it sees tensors that only C++ refers to."""

    NAMES = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


LIBC = ctypes.CDLL(None)
pytestmark = pytest.mark.skipif(not hasattr(LIBC, "mallinfo2"), reason="needs glibc")


def nbytes() -> int:
    LIBC.mallinfo2.restype = Allocated
    info = LIBC.mallinfo2()
    return info.uordblks + info.hblkhd


def leaks(call: Callable[[], Any]) -> bool:
    """Whether each fifth of the calls leaves a tensor, or the bytes of one small tensor for each second call."""
    counts = []
    for _ in range(5):
        for _ in range(CALLS // 5):
            call()
        gc.collect()
        counts.append((sum(isinstance(each, torch.Tensor) for each in gc.get_objects()), nbytes()))
    # The caches are full after the first fifth.
    tensors, sizes = zip(*((b[0] - a[0], b[1] - a[1]) for a, b in pairwise(counts)))
    return min(tensors) > 0 or min(sizes) >= CALLS // 5 // 2 * 400


def program(seed: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A function that makes the program of a seed, and runs it with regions."""
    found: list[Any] = []
    monkeypatch.setattr(compare, "compare", lambda make, run, around=None, **_: found.extend((make, run, around)))
    monkeypatch.setattr(compare, "keeps_no_more", lambda *_: None)
    monkeypatch.setattr(compare, "recomputes_no_more", lambda *_: None)
    exec(compile(source(seed), "<program>", "exec"), {"__name__": "program"})

    def run() -> None:
        with surrounded():
            observe(*found)

    return run


@pytest.mark.parametrize("part", range(PARTS))
def test_random_programs_leak_nothing(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [seed for seed in SEEDS[part::PARTS] if leaks(program(seed, monkeypatch))] == []


def test_a_region_around_a_gradient_leaks_nothing() -> None:
    inner = remat(lambda a: torch.func.vmap(lambda z: z.sin().exp())(a).sum())
    region = remat(torch.func.grad(inner), policy=policies.everything_saveable)
    x = torch.rand(4, 4)
    assert not leaks(lambda: region(x))


@pytest.mark.parametrize("kept", ["in Python", "in C++"])
def test_a_leak_is_found(kept: str) -> None:
    alive: list[Any] = []

    def call() -> None:
        out = torch.rand(4, 4, requires_grad=True).sin()
        alive.append(out if kept == "in Python" else torch.autograd.graph.get_gradient_edge(out))

    assert leaks(call)
