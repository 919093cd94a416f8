"""The compositions of transforms, on a device as on the CPU."""

from __future__ import annotations

import pytest
import test_words
from accelerator import DEVICE
from test_words import WORDS

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("W", "X"):
        monkeypatch.setattr(test_words, name, getattr(test_words, name).to(DEVICE))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("word", WORDS, ids=["-".join(word) for word in WORDS])
def test_word(word: tuple[str, ...]) -> None:
    test_words.test_word(word)
