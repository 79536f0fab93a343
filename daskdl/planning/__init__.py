"""Predicts what the workers of a cluster would be worth, from costs measured here."""
