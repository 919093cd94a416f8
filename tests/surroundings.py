"""The state around a region that must be as before after a test, an error, and a backward pass."""

import random
from typing import Any

import numpy as np
import torch

from remat._core import private
from remat._core.state import state

GENERATORS = ("torch generator", "python generator", "numpy generator")


def surroundings(*modules: torch.nn.Module) -> dict[str, Any]:
    """The state of the thread, and the identities of the parameters and buffers of modules."""
    numpy = np.random.get_state()
    return {
        "hooks": private.top_hooks(True),
        "hooks switch": private.hooks_disabled_message(),
        "level": (private.transforms_active(), private.current_level(), private.dual_level_active()),
        "torch generator": torch.get_rng_state().tolist(),
        "python generator": random.getstate(),
        "numpy generator": (numpy[0], numpy[1].tolist(), *numpy[2:]),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "attention": torch.backends.cuda.flash_sdp_enabled(),
        "function modes": torch.overrides._len_torch_function_stack(),
        "dispatch modes": torch.utils._python_dispatch._len_torch_dispatch_stack(),
        "state": [getattr(state, name) for name in dir(state) if not name.startswith("__")],
        "tensors": [id(t) for module in modules for t in (*module.parameters(), *module.buffers())],
    }


def assert_as_before(before: dict[str, Any], *modules: torch.nn.Module, drawn: bool = False) -> None:
    """``drawn``: the generators may have moved."""
    after = surroundings(*modules)
    different = [name for name, value in before.items() if after[name] != value]
    assert [name for name in different if not (drawn and name in GENERATORS)] == []
