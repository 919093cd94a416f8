"""What a recompute must see as the first run saw it, and leave as it was: random generators and settings."""
