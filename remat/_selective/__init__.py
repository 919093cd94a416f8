"""Saving under a policy: the log of a first run, what is saved of it, and what a recompute runs."""
