"""What every other subpackage may use: torch's private names, thread-local state, pytrees, tensors, devices."""
