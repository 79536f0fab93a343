"""Checkpoints as they lie in a folder: parts of one, and one after the other."""
