"""The device of the tests marked `cuda`: a GPU, or the simulated device under either of its names."""

import pytest
import torch

_current = torch.accelerator.current_accelerator()
DEVICE = "cuda" if _current is None else _current.type
backend = torch.get_device_module(DEVICE)  # torch.cuda, or another device's module
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param(DEVICE, marks=pytest.mark.cuda)])
LONG = 10**9  # cycles: the device is busy for about half a second
