"""One fit: what happens on the client, and what happens on each worker.

A :class:`~daskdl.training.base.TrainingMaster` is the user's choice of algorithm; the
:class:`~daskdl.training.base.Exchange` it makes lives in one replica and moves its
parameters. :mod:`~daskdl.training.fit` is the client's side from checked arguments to
the model, :mod:`~daskdl.training.replica` the loop of a worker. A backend places
replicas on a Dask cluster or on threads of this process; nothing else differs.
"""
