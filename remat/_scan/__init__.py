"""Loops of equal steps, with the fewest recomputed steps for the number of saved carries."""
