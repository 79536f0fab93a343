"""Predictions: for whole data sets, and for single calls."""
