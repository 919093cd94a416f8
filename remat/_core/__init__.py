"""What every other room may use: torch's private names, state of threads, pytrees, tensors, devices."""
