"""Random programs on a device, against the same programs without regions."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerator import DEVICE
from fuzz import check
from random_programs import toolbox
from torch import Tensor

pytestmark = pytest.mark.cuda
COUNT, PART = 60, 10


@pytest.fixture(autouse=True)
def _on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rand = toolbox.rand

    def on_device(*shape: int, grad: bool = True, **kwargs: Any) -> Tensor:
        with torch.device("cpu"):
            found = rand(*shape, grad=False, **kwargs)
        return found.to(DEVICE).requires_grad_(grad)

    monkeypatch.setattr(toolbox, "rand", on_device)
    monkeypatch.setattr(toolbox, "GENERATOR", torch.Generator(DEVICE))
    with torch.device(DEVICE):
        yield


@pytest.mark.parametrize("start", range(0, COUNT, PART))
def test_random_programs(start: int) -> None:
    check(range(start, start + PART))
