"""Threshold compression of flat vectors: updates to send, and updates to apply.

Three flat vectors describe the parameters of a model: *local*, the values that this
replica has trained; *shared*, whole grid steps, equal on all replicas at a sync point;
and the *residual*, what is not sent yet. A sparse update lists the positions whose
residual has reached the threshold; a dense one has the whole residual in eight bits.

:class:`~daskdl.compression.compressor.Compressor` proposes and commits updates of its
replica; its ``vector``, a
:class:`~daskdl.compression.replica_vector.ReplicaVector`, applies updates of other
replicas. Their callers do not deal with grids, dtypes, devices or compiled loops.
This package uses no network and no clock.
"""
