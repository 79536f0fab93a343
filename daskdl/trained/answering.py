"""What a model says: to data, and to calls."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from daskdl.cluster import check_outlives
from daskdl.data.batches import Transform
from daskdl.data.collections import is_lazy
from daskdl.data.formats.loaders import Loader
from daskdl.data.options import ReadOptions, one_of
from daskdl.inference.options import OutputOptions, Postprocess
from daskdl.serving.predictor import Predictor
from daskdl.sites import site_of
from daskdl.trained.base import HasModel


class Answering(HasModel):
    """Answers by its model."""

    def predict(
        self,
        X: Any,
        *,
        batch_size: int = 64,
        output: str | os.PathLike[str] = "same",
        postprocess: Postprocess | None = None,
        keyed: bool | None = None,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Apply `model_(x)` to every row, on the cluster or in this process.

        Args:
            X: Inputs, of the kinds that :meth:`fit` takes; labels that come with them
                are passed over. In a bag, and in a list of Delayed objects that are
                lists of examples, these may be pairs (key, x), and of any shapes.
            batch_size: Rows per forward pass.
            output: ``"same"``: what came in comes out. Or a folder, as a URL of fsspec
                or a path, that the workers write to, part by part: Parquet for a
                `dask.dataframe`, else safetensors. A run that was interrupted goes on
                with the parts that are missing when it is begun again.
            postprocess: Of the outputs of each batch, tensors, in tuples or dicts if
                the model returns such; returns tensors with the same rows, or such of
                them. It runs on the worker.
            keyed: Whether the examples of bags and lists are pairs (key, x); None: they
                are if the first begins with text, bytes, a UUID or a date, or with a
                whole number or a tuple of these before arrays.
            transform: See :meth:`fit`, as those that follow; y is None for it.
            loader: For files.
            collate_fn: For datasets.
            storage_options: Of the file system of `output`, for fsspec.

        Returns:
            The outputs in order. Of Dask's collections, lazy ones of the same kind, in
            the same partitions and with the same keys or index; a tensor of tensors,
            and of all else a numpy array. Where the outputs are tuples or dicts, such
            of these; but of a `dask.dataframe`, a dict of outputs with one number for
            each row is one dataframe with these columns. Its columns are `classes_`
            where there are as many outputs. With a folder, :class:`Predictions`.

        Raises:
            OptionError: If it would be lazy, and no cluster is there to compute it; or
                if the folder has predictions of another model, data or options.
        """
        names = getattr(self, "classes_", None)
        wanted = OutputOptions(output, postprocess, keyed, storage_options, names)
        both = one_of(transform, self.transform)
        read = ReadOptions(batch_size, both, loader, collate_fn)
        if is_lazy(X) and not wanted.writes:
            check_outlives(self.client)
        with site_of(self.client) as site:
            return site.predict(self._fitted(), X, read, wanted)

    def predictor(
        self,
        *,
        replicas: int = 2,
        batch_limit: int = 32,
        wait_ms: float = 2.0,
        queue_limit: int = 1024,
        transform: Transform | None = None,
    ) -> Predictor:
        """Let `model_` answer calls from many threads, on the cluster or here.

        It answers by the model of now; see :class:`daskdl.Predictor`, also for what it
        raises. It is to be closed, best by ``with``.

        Args:
            replicas: Models in the workers' memory.
            batch_limit: Rows of a batch, and of one call.
            wait_ms: How long a call waits for others to come at most.
            queue_limit: Rows that may wait for a replica.
            transform: See :meth:`fit`; y is None for it.
        """
        return Predictor(
            self._fitted(),
            replicas=replicas,
            batch_limit=batch_limit,
            wait_ms=wait_ms,
            queue_limit=queue_limit,
            transform=one_of(transform, self.transform),
            client=self.client,
        )
