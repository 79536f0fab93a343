"""Bytes on any fsspec URL: read whole, written at once, tried again when dropped."""
