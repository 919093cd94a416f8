"""A budget in place of a policy: what a function, or a model, can keep, and what that costs."""
