"""Evaluation: metrics that merge exactly, reports, and the loss of each example."""
