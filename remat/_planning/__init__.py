"""Chooses which modules of a model become regions, and what they save, for an amount of memory."""
