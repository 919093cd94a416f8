"""The compositions of transforms, on a device as on the CPU."""

from __future__ import annotations

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
