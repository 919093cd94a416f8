"""A recompute skips values that nothing needs, but not if they are read or stored after all, however that is done."""

import collections
import ctypes
import functools
import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import assert_same, rand
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad

from benchmarks.measure import PeakMemory, count_ops
from remat import RematWarning, checkpoint_name, policies, remat

N = 4
NAMES = policies.save_only_these_names("h")
pytestmark = pytest.mark.usefixtures("filled_memory")


def derivatives(fn: Callable[[Tensor], Tensor], size: int = N) -> list[Tensor]:
    x = rand(size, size)
    out = fn(x)
    return [out, *torch.autograd.grad(out.sum(), x)]


def at(address: int) -> float:
    return ctypes.c_double.from_address(address).value


def in_a_thread(fn: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """In a thread that works off a queue, and must not be stopped: the caller waits for its result."""

    def run(s: Tensor) -> Any:
        answers: queue.Queue = queue.Queue()
        threading.Thread(target=lambda: answers.put(fn(s)), daemon=True).start()
        return answers.get(timeout=60)

    return run


READERS: dict[str, Callable[[Tensor], Any]] = {
    # of a tensor that has a history
    "an operation": lambda s: s.detach().clone(),
    "tolist": lambda s: torch.tensor(s.tolist(), dtype=s.dtype),
    "numbers": lambda s: float(s[0, 0]) + len(range(int(s[0, 1]) + 3)) + complex(s[1, 1]).real + s[2, 2].item(),
    "branch": lambda s: 1.0 if s[0, 0] > 0.1 and s[0, 0] in s else 2.0,
    "index": lambda s: torch.ones(9)[: s[0, 0].long() % 3].sum() + [1.0, 2.0][s[0, 1].round().long() % 2],
    "text": lambda s: float(str(s[0, 0].clone()).partition("(")[2].partition(",")[0]) + len(f"{s[0, 0]:.3}"),
    "data_ptr": lambda s: at(s.data_ptr()) + at(s[1].data_ptr()),
    "storage": lambda s: at(s.untyped_storage().data_ptr()) + s.untyped_storage().tolist()[3] / 10,
    "torch.tensor of numbers": lambda s: torch.tensor([s.sum(), s[0, 1]], dtype=s.dtype).sum(),
    "new_tensor": lambda s: s.new_tensor([s.sum(), s[0, 1]]).sum(),
    "a Parameter": lambda s: torch.nn.Parameter(s).detach().clone(),
    "an operation in a thread": in_a_thread(lambda s: (s * 2).sum().detach()),
    "a view in a thread": lambda s: in_a_thread(lambda t: t.sum().detach())(s.view(2, 8)[1]),
    "a number in a thread": in_a_thread(lambda s: s.sum().item()),
    "numpy in a thread": in_a_thread(lambda s: float(np.sum(s.detach().numpy()))),
    # of one that has none
    "numpy": lambda s: torch.from_numpy(s.detach().view(2, 8).t().numpy().copy()).reshape(N, N),
    "a NumPy function": lambda s: float(np.sum(np.asarray(s.detach().unbind()[1]))),
    "from_dlpack": lambda s: torch.from_dlpack(s.detach()).clone(),
    "pickle": lambda s: pickle.loads(pickle.dumps(s.detach())),
}
SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "differentiated": lambda x: (x * 3).abs(),
    "constant": lambda x: (x.detach() * 3).abs(),
    "without grad": torch.no_grad()(lambda x: (x * 3).abs().view(2, 8).view(N, N)),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("reader", READERS)
def test_reads(reader: str, source: str) -> None:
    def fn(x: Tensor) -> Tensor:
        h = checkpoint_name(x.sin(), "h")
        return ((h * 2).exp() * READERS[reader](SOURCES[source](x))).sin()

    assert_same(derivatives(remat(fn, policy=NAMES)), derivatives(fn))


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("make", [lambda x: x * 3, lambda x: (x * 3).split(2), lambda x: (x * 3).view(2, 8)[1:]])
def test_a_skipped_value_that_is_stored_is_computed(make: Callable[[Tensor], Any], detached: bool) -> None:
    log: collections.deque[Any] = collections.deque()  # the tensors of a recompute would be removed from a list

    def fn(x: Tensor) -> Tensor:
        stored = make(x)
        log.append([t.detach() if detached else t for t in ([stored] if isinstance(stored, Tensor) else stored)])
        return (checkpoint_name(x.exp(), "h") * 2).sin()

    region = remat(fn, policy=NAMES)
    for _ in range(2):
        region(rand(N, N)).sum().backward()
        assert_same([t.detach() for t in log[-1]], [t.detach() for t in log[0]])
    assert len(log) == (4 if detached else 6)  # a recompute that skips what is stored is repeated


def test_an_error_after_a_read_does_not_hide_the_read() -> None:
    numbers: collections.deque[float] = collections.deque()

    def fn(x: Tensor) -> Tensor:
        h, skipped = checkpoint_name(x.sin(), "h"), (x * 3).abs()
        try:
            number = skipped.sum().tolist()
        except BaseException:
            raise ValueError("user code replaces the exception") from None
        numbers.append(number)
        return ((h * 2).exp() * number).sin()

    region, x = remat(fn, policy=NAMES), rand(N, N, grad=False)
    assert_same(derivatives(region), derivatives(fn))
    assert_same(grad(lambda x: region(x).sum())(x), grad(lambda x: fn(x).sum())(x))
    assert len({*numbers}) == 1  # no code runs with a number that was not computed


def test_a_value_in_the_place_of_a_freed_placeholder_can_be_read() -> None:
    x, part = rand(N, N), lambda x, _: checkpoint_name((x + 1).tanh(), "h").cos().exp()
    region = remat(lambda x: functools.reduce(part, range(50), x), policy=NAMES)
    assert count_ops(torch.autograd.grad, region(x).sum(), x)["aten.add"] == 0  # the recompute starts once


def test_large_placeholders_share_memory() -> None:
    def fn(x: Tensor) -> Tensor:
        found = [x]
        for _ in range(8):
            found.append(found[-1] + 1)  # all are alive until the end, and nothing needs them
        return checkpoint_name(found[-1] + 1, "h").sin().exp().sin()

    x = torch.ones(256, 256, requires_grad=True)
    loss = remat(fn, policy=NAMES)(x).sum()
    with PeakMemory() as memory:
        (found,) = torch.autograd.grad(loss, x)
    assert_same(found, torch.autograd.grad(fn(x).sum(), x)[0])
    assert memory.peak <= 3 * x.nbytes + 64  # 10 if each placeholder had its own memory


def test_placeholders_of_other_sizes() -> None:
    def fn(x: Tensor) -> Tensor:
        part, whole = x[:64] + 1, torch.cat([x, x + 1])
        return checkpoint_name(x * 2 + part.sum() + whole.sum(), "h").sin().exp().sin()

    region = remat(fn, policy=NAMES)
    assert_same(derivatives(region, 256), derivatives(fn, 256))
    with torch.device("meta"):
        assert derivatives(region, 256)[1].shape == (256, 256)
    with FakeTensorMode(), pytest.warns(RematWarning, match="Under FakeTensorMode a policy saves nothing"):
        assert derivatives(region, 256)[1].shape == (256, 256)
