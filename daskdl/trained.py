"""What a trainer does with its trained model: evaluate, predict."""

from collections.abc import Callable
from typing import Any, Literal

from distributed import Client
from torch import Tensor, nn

from daskdl.cluster import check_outlives
from daskdl.data.batches import Transform
from daskdl.data.collections import is_lazy
from daskdl.data.formats.loaders import Loader
from daskdl.data.options import OnBad, ReadOptions, one_of
from daskdl.data.sources import source_of
from daskdl.errors import OptionError
from daskdl.objective import Loss, OwnStep, objective_of
from daskdl.serving.predictor import Predictor
from daskdl.sites import site_of


class Trained:
    """Has a model, or will have; see :class:`daskdl.Trainer`, which is one.

    Attributes:
        client: Of the cluster to work on, if there is one.
        loss: Of the model, or None if there is a step.
        step: What computes the loss in its place, or None.
        transform: Of every batch, or None.
        model_: The model; not set before it is trained.
    """

    client: Client | Literal[False] | None
    loss: Loss | None
    step: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor] | None
    transform: Transform | None
    model_: nn.Module

    def evaluate(
        self,
        X: Any,
        y: Any = None,
        *,
        batch_size: int = 64,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
        on_bad_batch: OnBad = "raise",
    ) -> dict[str, float]:
        """Score `model_`, on the cluster or in this process.

        Args:
            X: Inputs, of the kinds that :meth:`fit` takes.
            y: Labels, likewise.
            batch_size: Rows per forward pass.
            transform: See :meth:`fit`, as those that follow.
            loader: For files.
            collate_fn: For datasets.
            on_bad_batch: What to do about parts that cannot be read.

        Returns:
            ``"loss"``, and for class indices ``"accuracy"``, means over all rows;
            with a `step` the loss only.
        """
        both = one_of(transform, self.transform)
        read = ReadOptions(batch_size, both, loader, collate_fn, on_bad_batch)
        objective = objective_of(self.loss, self.step)
        labelled = not isinstance(objective, OwnStep)
        source = source_of(X, y, read.source(None, labelled))
        with site_of(self.client) as site:
            return site.evaluate(self._fitted(), objective, source, read)

    def predict(
        self,
        X: Any,
        *,
        batch_size: int = 64,
        transform: Transform | None = None,
        loader: Loader | Callable[..., Any] | None = None,
        collate_fn: Callable[..., Any] | None = None,
    ) -> Any:
        """Apply `model_(x)` to every row, on the cluster or in this process.

        Args:
            X: Inputs, of the kinds that :meth:`fit` takes; labels that come with them
                are passed over.
            batch_size: Rows per forward pass.
            transform: See :meth:`fit`, as those that follow; y is None for it.
            loader: For files.
            collate_fn: For datasets.

        Returns:
            The outputs in order. Of Dask's collections, lazy ones of the same kind; a
            tensor of tensors, and of all else a numpy array. Where the model returns
            tuples or dicts, such of these.

        Raises:
            OptionError: If it would be lazy, and no cluster is there to compute it.
        """
        both = one_of(transform, self.transform)
        read = ReadOptions(batch_size, both, loader, collate_fn)
        if is_lazy(X):
            check_outlives(self.client)
        with site_of(self.client) as site:
            return site.predict(self._fitted(), X, read)

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

    def _fitted(self) -> nn.Module:
        if not hasattr(self, "model_"):
            raise OptionError("the trainer has no model_ yet; call fit first")
        return self.model_
