"""From what the user has to batches: arrays, checks, pieces, batches."""
