"""Datasets of ``torch.utils.data``: by index, and one item after the other."""
