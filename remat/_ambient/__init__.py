"""Ambient state: the random generators and settings that a recompute sees as the first run did, and then restores."""
