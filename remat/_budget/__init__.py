"""A memory budget in place of a policy, for a function or a model."""
