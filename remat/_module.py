"""The wrapper of a module, which is a module itself."""

from __future__ import annotations

from typing import Any

import torch


class RematModule(torch.nn.Module):
    """A module whose calls are regions.

    It shares the dictionaries of the module that it wraps: parameters, buffers and submodules have the same names in
    both, so ``state_dict``, ``functional_call`` and optimizers see no difference.
    """

    def __init__(self, module: torch.nn.Module, function: Any) -> None:
        super().__init__()
        self.__dict__["_remat"] = (function,)  # in a tuple: torch 2.11's Dynamo would bind it like a method
        self._share(module)

    def _share(self, module: torch.nn.Module) -> None:
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = module.__dict__[name]
        self.training = module.training

    @property
    def _wrapped(self) -> torch.nn.Module:
        return self.__dict__["_remat"][0]._fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_remat"][0](*args, **kwargs)

    def train(self, mode: bool = True) -> RematModule:
        self._wrapped.train(mode)
        self.training = mode
        return self

    def extra_repr(self) -> str:
        return f"remat of {type(self._wrapped).__name__}"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._wrapped, name)

    def __getstate__(self) -> dict:
        return {"_remat": self.__dict__["_remat"]}

    def __setstate__(self, state: dict) -> None:
        torch.nn.Module.__init__(self)
        self.__dict__["_remat"] = state["_remat"]
        self._share(self._wrapped)
