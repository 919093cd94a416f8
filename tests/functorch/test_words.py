"""Every word of up to three transforms: by call, and by torch.autograd through the whole."""

from __future__ import annotations

import pytest
from words import WORDS, check, plain_torch, through


@pytest.mark.sampled(5)
@pytest.mark.parametrize("word", WORDS, ids=["-".join(word) for word in WORDS])
def test_word(word: tuple[str, ...]) -> None:
    check(word)


def test_words_that_plain_torch_refuses_are_few() -> None:
    """So that the tests above do test something: all words without autograd, and many with it."""
    allowed = [word for word in WORDS[:56] if plain_torch(through, word) is not None]
    assert all(word in allowed for word in WORDS[:56] if "autograd" not in word)
    assert sum("autograd" in word for word in allowed) >= 6
