"""Predicts the speed of a cluster from costs measured on this machine."""
