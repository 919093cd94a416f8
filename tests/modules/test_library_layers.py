"""Layers that transformers could checkpoint itself: a region of one gets no key-value cache where it is recomputed."""

import contextlib
from typing import Any

import pytest
import torch
from blocks import in_place
from cases import rand
from torch import Tensor

import remat
from remat import RematWarning

layers = pytest.importorskip("transformers.modeling_layers")
DynamicCache = pytest.importorskip("transformers.cache_utils").DynamicCache


class Layer(layers.GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Identity()
        self.attention.layer_idx = 0  # type: ignore[assignment]

    def forward(self, x: Tensor, cache: Any = None, **options: Any) -> Tensor:
        self.got = cache, options
        return x.sin().exp()


def made(cls: type = Layer) -> Any:
    return in_place(cls()).train()


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("uses", [{}, {"use_cache": True}, {"use_cache": False}], ids=str)
def test_a_recomputed_layer_gets_no_cache_and_all_other_arguments(uses: dict, by_name: bool) -> None:
    layer, mask = made(), torch.ones(3)
    for cache in (DynamicCache(), None)[: 1 + uses.get("use_cache", False)]:
        args, kwargs = ((), {"cache": cache}) if by_name else ((cache,), {})
        with pytest.warns(RematWarning, match="a Layer that is a region runs without a cache"):
            layer(rand(3), *args, **kwargs, mask=mask, **uses).sum().backward()
        assert layer.got[0] is None and layer.got[1] == {**dict.fromkeys(uses, False), "mask": mask}


Reader = type("Reader", (Layer,), {"_can_checkpoint_with_cache": True})
Other = type("Other", (torch.nn.Module,), {"gradient_checkpointing": False, "forward": Layer.forward.__wrapped__})


@pytest.mark.parametrize("where", ["eval", "no_grad", "disable_remat", "a cache with keys", Reader, Other])
def test_a_layer_that_is_not_recomputed_or_does_not_fill_the_cache_gets_it(where: Any) -> None:
    layer, cache = made(where if isinstance(where, type) else Layer), DynamicCache()
    layer.train(where != "eval")
    if where == "a cache with keys":
        cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    contexts: dict[Any, Any] = {"no_grad": torch.no_grad(), "disable_remat": remat.disable_remat()}
    with contexts.get(where, contextlib.nullcontext()):
        layer(rand(3), cache, use_cache=True)
    assert layer.got[0] is cache and layer.got[1] == {"use_cache": True}
