"""A model that daskdl did not train."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from distributed import Client
from torch import nn
from typing_extensions import override

from daskdl.data.batches import Transform
from daskdl.data.formats.loaders import Loader
from daskdl.data.options import OnBad
from daskdl.inference.options import Postprocess
from daskdl.metrics.evaluation import Evaluation
from daskdl.objective import Loss
from daskdl.trained.trained import Trained


@dataclass
class Given(Trained):
    """Does with a given model what a trainer does with the one that it has trained.

    Args:
        model_: The model; not changed.
        client: As of a trainer.
        loss: For what needs one.
        transform: Of every batch, or None.
    """

    model_: nn.Module
    client: Client | Literal[False] | None = None
    loss: Loss | None = None
    transform: Transform | None = None
    step: None = None

    @override
    def _objective(self) -> Loss | None:
        return self.loss


def predict(
    model: nn.Module,
    data: Any,
    client: Client | Literal[False] | None = None,
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
    """Apply a model that daskdl did not train to every row.

    It does what :meth:`Trainer.predict` does with the model it has trained.

    Args:
        model: Any module; not changed, whatever mode it is in.
        data: Inputs, of the kinds that ``Trainer.fit`` takes.
        client: A synchronous `distributed.Client`; None: the default one, else a
            `LocalCluster` that is closed again; False: in this process.
        batch_size: See `Trainer.predict`, as those that follow.
        output: ``"same"``, or a folder to write to.
        postprocess: Of the outputs of each batch.
        keyed: Whether examples are pairs (key, x).
        transform: Of each batch.
        loader: For files.
        collate_fn: For datasets.
        storage_options: Of the file system of `output`.

    Returns:
        The outputs in order, lazy if the data are; or `Predictions`.

    Raises:
        DataError: If the data cannot be used.
        ModelError: If the model does not fit them.
        OptionError: If another argument cannot be used.

    Example:
        >>> import numpy as np
        >>> predict(nn.Flatten(), np.zeros((2, 3, 4)), client=False).shape
        (2, 12)
    """
    return Given(model, client).predict(
        data,
        batch_size=batch_size,
        output=output,
        postprocess=postprocess,
        keyed=keyed,
        transform=transform,
        loader=loader,
        collate_fn=collate_fn,
        storage_options=storage_options,
    )


def evaluate(
    model: nn.Module,
    data: Any,
    labels: Any = None,
    *,
    loss: Loss | None = None,
    metrics: Any = None,
    client: Client | Literal[False] | None = None,
    batch_size: int = 64,
    transform: Transform | None = None,
    loader: Loader | Callable[..., Any] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    on_bad_batch: OnBad = "raise",
) -> Evaluation:
    """Measure a model that daskdl did not train, in one pass.

    It does what :meth:`Trainer.evaluate` does with the model it has trained.

    Args:
        model: Any module; not changed, whatever mode it is in.
        data: Inputs, or inputs and labels, of the kinds that ``Trainer.fit`` takes.
        labels: Likewise.
        loss: ``loss(model(x), labels)``, which also says what the outputs are; None:
            it is not measured, and outputs are taken for what the first ones look like.
        metrics: See `Trainer.evaluate`.
        client: A synchronous `distributed.Client`; None: the default one, else a
            `LocalCluster` that is closed again; False: in this process.
        batch_size: See `Trainer.evaluate`, as those that follow.
        transform: Of each batch.
        loader: For files.
        collate_fn: For datasets.
        on_bad_batch: What to do about parts that cannot be read.

    Returns:
        A dict of all that was measured, over all rows, which prints as a report.

    Raises:
        DataError: If the data cannot be used.
        ModelError: If the model does not fit them.
        OptionError: If another argument cannot be used, or there is nothing to
            measure.

    Example:
        >>> import torch
        >>> rows, labels = torch.eye(2), torch.tensor([0, 1])
        >>> evaluate(nn.Identity(), rows, labels, client=False)
        {'accuracy': 1.0}
    """
    return Given(model, client, loss).evaluate(
        data,
        labels,
        metrics=metrics,
        batch_size=batch_size,
        transform=transform,
        loader=loader,
        collate_fn=collate_fn,
        on_bad_batch=on_bad_batch,
    )
