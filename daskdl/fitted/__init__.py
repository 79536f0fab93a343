"""A trainer that has been fitted, in a folder and back."""
