"""A policy at work: what a first run did, what is kept of it, and what a recompute runs."""
