"""The compositions of transforms, on a device."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import words
from accelerator import DEVICE

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("W", "X"):
        monkeypatch.setattr(words, name, getattr(words, name).to(DEVICE))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("word", words.WORDS, ids=["-".join(word) for word in words.WORDS])
def test_word(word: tuple[str, ...]) -> None:
    words.check(word)


@pytest.fixture
def one_core() -> Iterator[None]:
    """All threads of the process share one core."""
    threads = [int(path.name) for path in Path("/proc/self/task").iterdir()]
    cores = os.sched_getaffinity(0)
    for thread in threads:
        os.sched_setaffinity(thread, {min(cores)})
    yield
    for thread in threads:
        os.sched_setaffinity(thread, cores)


@pytest.mark.parametrize("word", ["vmap-jacrev-vjp", "grad-vjp-jacrev", "grad-jacrev-jacrev", "vjp-jacrev-jvp"])
def test_threads_that_release_tensors_late(word: str, one_core: None) -> None:
    """A tensor that the device's thread still references after an inner backward pass is not a captured tensor."""
    for _ in range(3):
        words.check(tuple(word.split("-")))
