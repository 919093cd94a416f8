"""The ambient state of a run, restored for a recompute: random generators and settings."""
