"""What the inputs are scaled by, learnt in one pass over the data."""
