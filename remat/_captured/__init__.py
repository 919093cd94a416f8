"""What a function reads besides its arguments: found without running it, and restored for a recompute."""
