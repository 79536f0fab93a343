"""Columns of pandas and pyarrow."""
