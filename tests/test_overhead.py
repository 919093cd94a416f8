"""What a region costs beside its operations, as far as that can be counted rather than timed."""

from __future__ import annotations

import gc
import random
import sys

import numpy as np
import optree
import pytest
import torch
from cases import run_program

from benchmarks.measure import gc_disabled
from remat import _slow_states, remat
from remat._arguments import Positional, Tensors, take_apart
from remat._captured import NOTHING, find
from remat._slow_states import SlowState, together


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def test_few_objects_live_for_each_region() -> None:
    """The garbage collector looks at all of them again and again, so that many regions would take more time each."""
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    fn = remat(layer)
    fn(x, w)
    with gc_disabled():
        before = len(gc.get_objects())
        out = x
        for _ in range(100):
            out = fn(out, w)
        added = len(gc.get_objects()) - before
    assert 100 <= added <= 100 * 32
    torch.autograd.grad(out.sum(), [x, w])


_number = torch.empty(1)
DRAWS = {"python": random.random, "numpy": np.random.random_sample, "torch": _number.uniform_}


def slow_state(name: str) -> SlowState:
    if name == "torch":
        return SlowState(_slow_states.torch_host)
    return SlowState(together(_slow_states.python, _slow_states.numpy()))


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_of_a_slow_generator_is_seen(name: str) -> None:
    """Its state is known by a few bytes: over several rounds of the generator, no two of its states look the same."""
    slow, draw = slow_state(name), DRAWS[name]
    start = slow.get_state()
    try:
        seen = set()
        for _ in range(3 * 624):
            seen.add(slow.get_state().look)
            draw()
        assert len(seen) == 3 * 624 and None not in seen
        assert sum(sys.getsizeof(part) for part in next(iter(seen)) if isinstance(part, bytes)) < 500
        other = slow.get_state()
        assert other is not start and other is slow.get_state()
    finally:
        slow.set_state(start)
    now = slow.get_state()
    assert torch.equal(now.value, start.value) if name == "torch" else now.value is start.value


KINDS = {
    "uniform": lambda: torch.rand(1),
    "uniform double": lambda: torch.rand(1, dtype=torch.float64),
    "half a pair of normals": lambda: torch.randn(1),
    "the other half": lambda: torch.randn(1),
    "half a pair of doubles": lambda: torch.randn(1, dtype=torch.float64),
    "their other half": lambda: torch.randn(1, dtype=torch.float64),
    "many normals": lambda: torch.randn(100),
    "integers": lambda: torch.randint(5, (3,)),
    "permutation": lambda: torch.randperm(5),
    "bernoulli": lambda: torch.empty(7).bernoulli_(),
    "exponential": lambda: torch.empty(1).exponential_(),
    "a seed": lambda: torch.manual_seed(3),
    "another seed": lambda: torch.manual_seed(4),
    "a state": lambda: torch.set_rng_state(torch.Generator().manual_seed(5).get_state()),
}


def test_every_kind_of_draw_of_torch_is_seen() -> None:
    slow = slow_state("torch")
    before = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        for name, draw in KINDS.items():
            then = slow.get_state()
            assert then is slow.get_state()
            draw()
            now = slow.get_state()
            assert now is not then, name
            assert torch.equal(now.value, torch.get_rng_state()), name
    finally:
        torch.set_rng_state(before)


@pytest.mark.parametrize(
    "program", ["torch.vmap(imported)(x)", "make_fx(imported)(x).code", "FakeTensorMode().__enter__()"]
)
def test_trying_it_out_is_nobody_elses_business(program: str) -> None:
    """The package may be imported under a transform that forbids draws, under a trace, or where nothing is real."""
    setup = """
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
imported = lambda x: (__import__("remat"), x.sin())[1]
x, before = torch.ones(3), torch.get_rng_state()
"""
    check = """
after = torch.default_generator.get_state()
from remat import _slow_states
print("normal_" in str(result), bytes(after.tolist()) == bytes(before.tolist()), len(_slow_states._torch_parts))
"""
    code = f"{setup}result = {program}\n{check}"
    assert run_program(code).split() == ["False", "True", "2"]


def test_a_generator_of_another_layout_is_read_each_time() -> None:
    slow = SlowState(_slow_states.torch_host._replace(find=lambda: ()))
    first, second = slow.get_state(), slow.get_state()
    assert first.look is None and first.value is not second.value
    expected = torch.rand(3)
    slow.set_state(first)
    assert torch.equal(torch.rand(3), expected)


def test_another_generator_in_the_place_of_the_first_is_seen() -> None:
    slow = SlowState(_slow_states.numpy())
    old = np.random.get_bit_generator()
    state = slow.get_state()
    np.random.set_bit_generator(np.random.MT19937(5))
    try:
        assert slow.get_state() is not state
        first = slow.get_state()
        assert slow.get_state() is first
        np.random.rand()
        assert slow.get_state() is not first
    finally:
        np.random.set_bit_generator(old)


def test_calls_with_as_many_tensors_share_their_structure() -> None:
    x, w = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    (given, tensors), (again, others) = take_apart((x, w), {}), take_apart((w, x), {})
    assert given is again and isinstance(given, Positional)
    assert tensors == [x, w] and others == [w, x]
    args, kwargs = given.filled([w, x, x])  # the last one is an operand beyond the arguments
    assert list(args) == [w, x] and not kwargs
    assert [given.name(i) for i in range(2)] == ["argument args[0]", "argument args[1]"]


@pytest.mark.parametrize("case", ["twice", "keyword", "number", "container"])
def test_other_calls_do_not(case: str) -> None:
    x, w = torch.ones(2), torch.ones(2)
    args, kwargs = {
        "twice": ((x, w, x), {}),
        "keyword": ((x,), {"w": w}),
        "number": ((x, w, 3), {}),
        "container": (([x, w],), {}),
    }[case]
    given, tensors = take_apart(args, kwargs)
    assert not isinstance(given, Positional) and len(tensors) == 2
    new = [torch.zeros(2), torch.zeros(2)]
    filled = given.filled(new)
    assert [t for t in optree.tree_leaves(filled) if t is new[0] or t is new[1]]
    assert not any(leaf is x or leaf is w for leaf in optree.tree_leaves(filled))


def test_tensors_in_containers_go_back_where_they_were() -> None:
    a, b, c = (torch.full((2,), float(i)) for i in range(3))
    given, tensors = take_apart(({"z": a, "y": [b]},), {"w": (c,)})
    assert isinstance(given, Tensors)
    by_name = {given.name(i): tensor for i, tensor in enumerate(tensors)}
    assert by_name == {"argument args[0]['z']": a, "argument args[0]['y'][0]": b, "argument kwargs['w'][0]": c}
    args, kwargs = given.filled([*(t + 10 for t in tensors), torch.zeros(2)])  # the last one is an operand beyond them
    assert list(args[0]) == ["z", "y"] and list(kwargs) == ["w"]
    assert [t[0].item() for t in (args[0]["z"], args[0]["y"][0], kwargs["w"][0])] == [10, 11, 12]


WEIGHT = torch.ones(2)


def reads_a_global(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT


def calls_a_helper(x: torch.Tensor) -> torch.Tensor:
    return reads_a_global(x)


def has_a_default(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x * factor


def test_a_function_that_reads_libraries_alone_is_not_searched() -> None:
    bound = torch.ones(2)
    find(layer)  # by then it is known which of its globals are libraries
    assert find(layer) is NOTHING
    for fn in (reads_a_global, calls_a_helper, has_a_default, lambda x: x * bound):
        assert find(fn) is not NOTHING
    assert [value is WEIGHT for _, value in find(calls_a_helper).places] == [True]


def test_it_is_searched_when_its_globals_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * np

    find(fn)
    assert find(fn) is NOTHING
    monkeypatch.setitem(globals(), "np", WEIGHT)
    assert [value is WEIGHT for _, value in find(fn).places] == [True]
