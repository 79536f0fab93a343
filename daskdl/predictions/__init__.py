"""Predictions in files: written by the workers that make them, and read back."""
