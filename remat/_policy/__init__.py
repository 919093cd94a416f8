"""Policies: which values a region may save, by operators, names and predicates."""
