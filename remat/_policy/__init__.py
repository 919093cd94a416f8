"""What may be kept, as values: policies, names, operators."""
