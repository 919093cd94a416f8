"""Shared by all other packages: torch's private names, thread state, pytrees, tensors, devices."""
