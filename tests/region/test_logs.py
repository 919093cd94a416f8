"""The log records at DEBUG: what each region saves."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from cases import rand
from torch.func import grad, vmap

from remat import policies, remat

W = rand(4, 4, grad=False)


@pytest.mark.parametrize("differentiate", [lambda f, x: f(x).sum().backward(), lambda f, x: vmap(grad(f))(x.detach())])
def test_each_region_says_once_what_it_saves(differentiate: Callable, caplog: pytest.LogCaptureFixture) -> None:
    inner = remat(torch.sin)
    region = remat(lambda x: inner(torch.tanh(x @ W)).exp().sum(), policy=policies.save_matmuls)
    with caplog.at_level(logging.DEBUG, "remat"):
        differentiate(region, rand(2, 4))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2 and all(record.name == "remat" for record in caplog.records)
    assert "sin called at" in texts[0] and "values, 0 B: none" in texts[0]
    assert "<lambda> called at" in texts[1] and "argument x float64[" in texts[1]
    assert "captured global 'W' float64[4, 4]" in texts[1] and "aten.mm.default at" in texts[1]


def test_nothing_is_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    remat(torch.sin)(rand(3)).sum().backward()
    assert not caplog.records
