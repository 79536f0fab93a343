"""Threshold compression of flat vectors: updates to send, and updates to apply.

The parameters of a model form a flat vector in three states: *local*, the values that
this replica has trained; *shared*, the grid steps that all replicas agree on; and the
*residual*, their unsent difference. A sparse update lists the positions whose residual
has reached the threshold; a dense one has the whole residual in eight bits.

:class:`~daskdl.compression.compressor.Compressor` proposes and commits updates of its
replica; its ``vector``, a
:class:`~daskdl.compression.replica_vector.ReplicaVector`, applies updates of other
replicas. These two hide grids, dtypes, devices, parameter groups and compiled loops.
This package uses no network and no clock.
"""
