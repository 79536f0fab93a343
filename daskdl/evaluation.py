"""Loss and accuracy of a model on data: in one process, and over all workers.

What is merged are sums and counts, never means, so that unequal parts weigh what
they should and any way of cutting the data gives the same answer.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from dask.delayed import delayed
from distributed import Client
from torch import Tensor, nn

from daskdl.data.arrays import check_batch_size, check_labels, is_dask_array
from daskdl.data.batches import auto_device, batches, floating_dtype, to_device
from daskdl.data.checks import check_data, check_loss, check_module
from daskdl.data.futures import new_key, release, workers_of
from daskdl.data.pieces import place
from daskdl.data.rehearsal import (
    ClassRange,
    ignored_label,
    random_state_left_alone,
    rehearse,
)
from daskdl.data.sources import DaskBlocks, Rows, source_of
from daskdl.errors import DataError
from daskdl.objective import Objective, OwnStep, batch_loss, is_sum, on_device
from daskdl.packed import Packed, PackedModel


@dataclass(frozen=True)
class Score:
    """What a model did on some examples, as sums that can be added up.

    Args:
        loss_sum: Sum of the losses of the examples.
        correct: Labels that were predicted right.
        labels: Labels that were predicted at all; 0 if they are no class indices.
        examples: Rows of the data.

    Example:
        >>> (Score(3.0, 1, 2, 2) + Score(1.0, 1, 1, 1)).metrics()
        {'loss': 1.3333333333333333, 'accuracy': 0.6666666666666666}
    """

    loss_sum: float = 0.0
    correct: int = 0
    labels: int = 0
    examples: int = 0

    @property
    def has_accuracy(self) -> bool:
        """Whether there were class indices to be right about."""
        return self.labels > 0

    def __iter__(self) -> Iterator[float]:
        """The four numbers, so that ``Score(*list(score))`` is the score again."""
        return iter((self.loss_sum, self.correct, self.labels, self.examples))

    def __add__(self, other: "Score") -> "Score":
        return Score(
            self.loss_sum + other.loss_sum,
            self.correct + other.correct,
            self.labels + other.labels,
            self.examples + other.examples,
        )

    def metrics(self) -> dict[str, float]:
        """The mean loss per example, and the share of right labels if there is one.

        Raises:
            DataError: If nothing has been scored.
        """
        if not self.examples:
            raise DataError("no examples were scored")
        metrics = {"loss": self.loss_sum / self.examples}
        if self.has_accuracy:
            metrics["accuracy"] = self.correct / self.labels
        return metrics


def evaluate(
    model: nn.Module,
    loss: Objective,
    X: Any,
    y: Any,
    client: Client,
    *,
    batch_size: int = 64,
) -> dict[str, float]:
    """Measure a model on data, with every worker doing a part.

    Args:
        model: Not changed, whatever mode it is in.
        loss: ``loss(output, labels)``, a mean over a batch, or a sum if it has
            ``reduction="sum"``; or a step of the user's own. Batches weigh by their
            examples.
        X: Examples: a numpy array, a torch tensor or a ``dask.array``, whose blocks
            are computed and dropped one after the other.
        y: Their labels, of the same kind.
        client: A synchronous client.
        batch_size: Rows per forward pass, >= 1.

    Returns:
        ``"loss"``, the mean over the examples, and ``"accuracy"``, the share of right
        labels, if the labels are class indices and the outputs one score per class.
        A step of the user's own shows no outputs: of it there is only the loss.

    Raises:
        DataError: If the data cannot be used, see `check_data`.
        ModelError: If model and loss do not fit the data.
        OptionError: If the batch size or the client cannot be used.
    """
    packed, accepted = _prepared(model, loss, X, y, batch_size)
    workers = workers_of(client)
    # Once to each worker, instead of once with each task.
    names = new_key("model"), new_key("loss")
    sent = client.scatter(dict(zip(names, packed, strict=True)), broadcast=True)
    sent_model, sent_loss = (sent[name] for name in names)
    try:
        if is_dask_array(X):
            source = DaskBlocks(X, y)
            rows = [source.delayed(i) for i in range(len(source.lengths))]
            task = _Task(sent_model, sent_loss, batch_size, accepted)
            return _score_on_workers(rows, task, client)
        with place(
            X,
            y,
            client,
            workers,
            batch_size=batch_size,
            replicas=len(workers),
            shuffle_seed=None,
        ) as pieces:
            task = _Task(
                sent_model, sent_loss, batch_size, None
            )  # all labels have been looked at
            return _score_on_workers(pieces.futures, task, client)
    finally:
        release(sent.values())


def evaluate_here(
    model: nn.Module, loss: Objective, X: Any, y: Any, *, batch_size: int = 64
) -> dict[str, float]:
    """The same in this process, piece after piece; arguments as of `evaluate`.

    Example:
        >>> x, y = torch.tensor([[0.0, 1.0]]), torch.tensor([1])
        >>> evaluate_here(nn.Identity(), nn.NLLLoss(), x, y)
        {'loss': -1.0, 'accuracy': 1.0}
    """
    (packed_model, packed_loss), accepted = _prepared(model, loss, X, y, batch_size)
    source = source_of(X, y, batch_size, replicas=1, shuffle_seed=None)
    scores = (
        score_rows(packed_model, packed_loss, batch_size, accepted, source.rows(i), i)
        for i in range(len(source.lengths))
    )
    return sum(scores, Score()).metrics()


def _prepared(
    model: nn.Module, loss: Objective, X: Any, y: Any, batch_size: int
) -> tuple[tuple[PackedModel, Packed[Objective]], ClassRange | None]:
    """Check everything; what travels, and the labels that the loss accepts."""
    check_data(X, y)
    check_batch_size(batch_size)
    check_module(model)
    check_loss(loss)
    argument = "step" if isinstance(loss, OwnStep) else "loss"
    packed = PackedModel(model), Packed(loss, argument)
    with random_state_left_alone():
        return packed, rehearse(packed[0].unpack().eval(), loss, X, y)


def score_batches(
    module: nn.Module,
    loss: Objective,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device | str,
) -> Score:
    """Score a module on batches, in evaluation mode, which is undone afterwards.

    Gradients are off, but not by inference mode: what a live module caches at its
    first forward pass would then be of no use to training.

    Args:
        module: On ``device``; its parameters and modes are left as they were.
        loss: On ``device``, as in `evaluate`.
        batches: Pairs of tensors on any device.
        device: Where to compute.

    Example:
        >>> rows = [(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))]
        >>> score_batches(nn.Identity(), nn.NLLLoss(), rows, "cpu")
        Score(loss_sum=-1.0, correct=1, labels=1, examples=1)
    """
    total = Score()
    dtype = floating_dtype(module)
    with _evaluating(module), torch.no_grad():
        for x, y in batches:
            total += _score_batch(module, loss, *to_device(x, y, device, dtype))
    return total


def _score_batch(module: nn.Module, loss: Objective, x: Tensor, y: Tensor) -> Score:
    if isinstance(loss, OwnStep):
        return Score(batch_loss(loss, module, (x, y)).item() * len(x), examples=len(x))
    output = module(x)
    loss_sum = loss(output, y).item()
    if not is_sum(loss):
        loss_sum *= len(x)
    if not _is_classification(output, y):
        return Score(loss_sum, examples=len(x))
    ignored = ignored_label(loss)
    counted = torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored
    right = (output.argmax(dim=1) == y) & counted
    return Score(loss_sum, int(right.sum()), int(counted.sum()), len(x))


def _is_classification(output: Any, y: Tensor) -> bool:
    """Class indices, and one score per class along dimension 1 of the output."""
    return (
        y.dtype == torch.int64  # as `to_device` makes every integer label
        and isinstance(output, Tensor)
        and output.ndim == y.ndim + 1
        and (output.shape[0], *output.shape[2:]) == y.shape
    )


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; each submodule gets its own mode back, frozen ones too."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


class _Task(NamedTuple):
    """What every worker needs to know to score its parts; Dask futures and values."""

    model: Any  # future of a PackedModel
    loss: Any  # future of a Packed loss
    batch_size: int
    accepted: ClassRange | None  # labels of pieces that no client has seen


def _score_on_workers(rows: list[Any], task: _Task, client: Client) -> dict[str, float]:
    """Score pieces, given as futures or delayed pairs, wherever they are."""
    score = delayed(score_rows, pure=False)
    name = new_key("score")
    tasks = client.compute(
        [
            score(*task, part, i, dask_key_name=f"{name}-{i}")
            for i, part in enumerate(rows)
        ]
    )
    try:
        return sum(client.gather(tasks), Score()).metrics()
    finally:
        release(tasks)


def score_rows(
    model: PackedModel,
    loss: Packed[Objective],
    batch_size: int,
    accepted: ClassRange | None,
    rows: Rows,
    index: int,
) -> Score:
    """Score one piece on a worker; the task behind `evaluate`.

    Raises:
        DataError: If it has a label that the loss does not accept.
    """
    if accepted is not None:
        where = f"y of piece {index}"
        check_labels(rows[1], accepted.classes, where, accepted.ignore_index)
    device = auto_device()
    module = model.module(lambda copy: copy.eval().to(device))
    own_loss = loss.shared(lambda copy: on_device(copy, device))
    # What a step of the user's own computes may need gradients with respect to x.
    own = isinstance(own_loss, OwnStep)
    with torch.no_grad() if own else torch.inference_mode():
        return score_batches(module, own_loss, batches([rows], batch_size), device)
