"""Policies as values: operators, names, and what may be saved."""
