"""Batch files: data prepared once, in shuffled files of batches on any fsspec URL."""
