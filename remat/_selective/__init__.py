"""Regions with a policy: the record of the first run, what is saved of it, and what a recompute executes."""
