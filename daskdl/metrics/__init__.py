"""What is measured of a model's outputs and labels, in one pass and exactly merged.

The numbers are those of torchmetrics; what is here says which, and how they are put
together from parts. No Dask.
"""
