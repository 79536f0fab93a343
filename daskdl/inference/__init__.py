"""Inference: outputs for whole data sets, and for single calls."""
