"""The channel between the replicas of a run."""
