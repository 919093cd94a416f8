"""What a program keeps, computes and changes, measured by running it."""
