"""The captured tensors and variables of a function: found without running it, and restored for a recompute."""
