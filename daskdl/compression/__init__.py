"""Threshold compression of flat vectors: updates to send, and updates to apply.

The parameters of a model are flat vectors, each in three states: *local* has the values
that this replica has trained, *shared* counts the grid steps that all replicas agree
on, and the *residual*, their difference, has yet to be sent. An update is the set of
positions whose residual has reached the threshold.

:class:`~daskdl.compression.compressor.Compressor` proposes updates and commits those
that the channel has accepted; its ``vector``, a
:class:`~daskdl.compression.replica_vector.ReplicaVector`, applies those of other
replicas. Grids, dtypes, devices, parameter groups and compiled loops stay behind these
two. No network and no clock are used here.
"""
