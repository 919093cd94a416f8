"""Amounts as users write them and as they are printed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from remat._core.amounts import aligned, count_text, flops_text, number_text, parse_amount, percent_text, size_text


@pytest.mark.parametrize(
    "amount, nbytes",
    [(0, 0), (7, 7), (0.5, 50), (1.0, 100), ("3B", 3), ("1.5KiB", 1536), (" 2 MB ", 2_000_000), (" 2.5 % ", 2)],
)
def test_amounts(amount: Any, nbytes: int) -> None:
    assert parse_amount(amount, 100, "amount") == nbytes


WRONG = [(TypeError, None, "must be"), (TypeError, True, "True"), (ValueError, 0.0, "fraction"),
         (ValueError, 1.5, "fraction"), (ValueError, -1, "negative"), (ValueError, "7 XB", "number and a"),
         (ValueError, "much", "number and a"), (ValueError, "0%", "number and a"),
         (ValueError, "150%", "number and a")]  # fmt: skip


@pytest.mark.parametrize("error, amount, says", WRONG, ids=str)
def test_what_is_not_an_amount_is_an_error_with_its_name(error: type[Exception], amount: Any, says: str) -> None:
    with pytest.raises(error, match=f"^the limit .*{says}"):
        parse_amount(amount, 100, "the limit")


READABLE = [(size_text, 1023, "1023 B"), (size_text, 2**20 - 1, "1 MiB"), (size_text, 5000 * 2**40, "5000 TiB"),
            (number_text, 1200.4, "1,200"), (number_text, 12.34, "12.3"), (partial(percent_text, 1), 3, "+33 %"),
            (partial(percent_text, 1), 0, ""), (partial(percent_text, 0), 3, ""), (flops_text, 12, "12 FLOP"),
            (flops_text, 999_960, "1 MFLOP"), (flops_text, 12_345_678, "12.3 MFLOP"),
            (flops_text, 0, "0"), (size_text, -2048, "-2 KiB"), (partial(count_text, what="row"), 1, "1 row"),
            (partial(count_text, what="row"), 0, "0 rows"), (partial(aligned, align="<"), [
                ["a", "", "b", "1"], ["c", "", "1", "0"]], ["a  b  1", "c  1  0"])]  # fmt: skip


@pytest.mark.parametrize(("text", "number", "expected"), READABLE)
def test_amounts_are_easy_to_read(text: Callable, number: int, expected: str) -> None:
    assert text(number) == expected
