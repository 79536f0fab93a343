"""What a model says to data, computed by all workers."""
