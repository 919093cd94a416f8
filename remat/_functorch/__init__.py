"""Regions through the levels of torch.func, by one rule for each kind of level."""
