"""The device of the tests marked `cuda`: a GPU, or the simulated device under either of its names."""

import torch

_current = torch.accelerator.current_accelerator()
DEVICE = "cuda" if _current is None else _current.type
backend = torch.get_device_module(DEVICE)  # torch.cuda, or another device's module
LONG = 10**9  # cycles: the device is busy for about half a second
