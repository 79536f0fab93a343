"""The loss of each example, by example rather than by batch.

Numbers are in `losses`, `guesses` and `weight_decay`; `scorer` and `parts` go where the
data are; `keys` and `keyed` name examples; `worst` is what is looked at in the end.
Beginning and end of it all are in `rehearsal` and `scores`.
"""
