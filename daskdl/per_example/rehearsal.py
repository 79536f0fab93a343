"""What is to be scored example by example, and whether model and loss fit it."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from distributed import Client
from torch import nn

from daskdl.data.batching import Batch
from daskdl.data.checks import check_rows, check_same_classes, check_whole, rows_like
from daskdl.data.collections import is_bag, is_lazy_list
from daskdl.data.labels import LabelCheck
from daskdl.data.looking import looked_at
from daskdl.data.models import check_loss, check_module
from daskdl.data.options import ReadOptions
from daskdl.data.rehearsal import MISFITS, random_state_left_alone, rehearsed_batch
from daskdl.data.source import Source
from daskdl.data.sources import source_of
from daskdl.errors import ModelError, OptionError
from daskdl.objective import Objective, OwnStep
from daskdl.outputs.examples import Examples
from daskdl.outputs.first_rows import with_first_rows
from daskdl.per_example.guesses import guesses_of
from daskdl.per_example.losses import example_losses, has_rows
from daskdl.per_example.parts import Reading
from daskdl.per_example.scorer import ExampleScorer, check_rows_kept
from daskdl.serialization import Packed, PackedModel

REHEARSED = 2  # rows of `rehearsed_batch`


class Given(NamedTuple):
    """Data to be scored, as the user gave them."""

    X: Any
    y: Any = None
    key: Any = None


class Scores(NamedTuple):
    """How they are scored."""

    model: nn.Module  # not changed, whatever mode it is in
    objective: Objective
    read: ReadOptions
    penalty: float = 0.0  # added to each score
    classes: Sequence[str] | None = None  # names of labels that the model knows


def known_source(given: Given, how: Scores, client: Client | Literal[False]) -> Source:
    """The data, of which enough is known to begin; of bags and lists `Examples`."""
    check_module(how.model)
    check_loss(how.objective)
    labelled = not isinstance(how.objective, OwnStep)
    source = source_of(given.X, given.y, how.read.source(None, labelled))
    check_same_classes(source, how.classes)
    if how.read.skips:
        return looked_at(source, client, skips=True)
    if is_bag(given.X) or is_lazy_list(given.X):
        source = Examples(given.X, given.key)
    return with_first_rows(source, client)


def prepared(
    source: Source, how: Scores, *, here: bool, wrong_only: bool = False
) -> tuple[ExampleScorer, Reading]:
    """Rehearse on two rows, so that what does not fit is found here.

    Args:
        source: Of which some rows are known.
        how: With which model, and how they are read.
        here: It is all done in this process.
        wrong_only: Whether it has to be known what is wrong.
    """
    transform, rows = how.read.transform, rows_like(source)
    accepted = check_rows(how.model, how.objective, *rows, transform)
    labels = None if transform else LabelCheck(accepted)
    if labels is not None:
        check_whole(source, labels)
    own = isinstance(how.objective, OwnStep)
    packed = PackedModel(how.model, here=here)
    loss = Packed(how.objective, "step" if own else "loss")
    with random_state_left_alone():
        module = packed.unpack().eval()
        batch = rehearsed_batch(module, *rows, transform)
        check_rows_kept(batch, REHEARSED)
        by_rows = _rehearse(module, loss.unpack(), batch, wrong_only)
    scorer = ExampleScorer(
        packed, loss, how.read.batch_size, transform, by_rows, how.penalty
    )
    return scorer, Reading(labels, how.read.skips)


def _rehearse(
    module: nn.Module, loss: Objective, batch: Batch, wrong_only: bool
) -> bool:
    """Whether outputs have a row for each of the inputs.

    Raises:
        ModelError: If the loss cannot be had of one row.
        OptionError: If it is not known what is wrong.
    """
    own = isinstance(loss, OwnStep)
    try:
        with torch.no_grad():
            by_rows = not own and has_rows(module, batch[0])
            output = example_losses(module, loss, batch, by_rows=by_rows).output
    except MISFITS as error:
        raise ModelError(
            f"{'step' if own else 'loss'} failed on a batch of one row, which is how "
            f"each example gets a score: {error}"
        ) from error
    if wrong_only and guesses_of(loss, output, batch[1]) is None:
        raise OptionError(
            "wrong_only=True needs a loss, labels that are one class index for each "
            "row, and a model that gives one output for each class"
        )
    return by_rows
