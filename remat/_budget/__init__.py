"""Budgets instead of policies: what a function, or a model, can save, and what the recompute costs then."""
