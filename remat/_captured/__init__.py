"""What a function reads and does not get as an argument: found without running it, and put back for a recompute."""
