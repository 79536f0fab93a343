"""Files packed as they are into a few large ones, and read from there."""
