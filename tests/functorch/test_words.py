"""All compositions of up to three transforms, called directly, and with torch.autograd around the whole."""

from __future__ import annotations

import pytest
from words import WORDS, check, plain_torch, through


@pytest.mark.sampled(5)
@pytest.mark.parametrize("word", WORDS, ids=["-".join(word) for word in WORDS])
def test_word(word: tuple[str, ...]) -> None:
    check(word)


def test_plain_torch_raises_for_few_words() -> None:
    """So the tests above are not vacuous: they cover all words without autograd, and many with it."""
    allowed = [word for word in WORDS[:56] if plain_torch(through, word) is not None]
    assert all(word in allowed for word in WORDS[:56] if "autograd" not in word)
    assert sum("autograd" in word for word in allowed) >= 6
