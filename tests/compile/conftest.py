"""Each test starts with an empty cache of Dynamo, and leaves saved-tensor hooks enabled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    enabled = torch._C._autograd._saved_tensors_hooks_is_enabled()
    torch._C._autograd._saved_tensors_hooks_enable()
    torch._dynamo.reset()
    assert enabled
