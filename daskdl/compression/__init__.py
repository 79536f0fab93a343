"""What a replica sends and what it applies: threshold compression of flat vectors.

The parameters of a model are flat vectors. Each has three states: *local* is what the
replica has trained, *shared* counts the grid steps that all replicas agree on, and the
*residual* is their difference. An update is the set of positions whose residual has
reached the threshold. :class:`~daskdl.compression.compressor.Accumulator` proposes
updates and applies those of other replicas; grids, dtypes, devices, parameter groups
and the compiled loops stay behind it. There is no network and no clock in this package.
"""
