"""From what the replicas report at the end of an epoch to a row of the history."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from daskdl.errors import DataError
from daskdl.scores import Score
from daskdl.training.statistics import Statistics

Note = Mapping[str, Any]


def row_of(
    epoch: int,
    event: Mapping[str, Any],
    size: int,
    seconds: float,
    scores: Sequence[str] = (),
    left_out: int = 0,
) -> dict[str, Any]:
    """Sum up an epoch.

    Args:
        epoch: Counted from 0.
        event: As the scheduler announced it: notes by replica, and its counters.
        size: Parameters of the model.
        seconds: Since the end of the epoch before.
        scores: Columns of the validation data; NaN where the model was not scored.
        left_out: Examples that were in no part from the beginning.

    Raises:
        DataError: If all examples were left out.
    """
    notes: Sequence[Note] = [note for _, note in event["notes"]]
    departed = event["departed"]
    check_trained(epoch, notes, departed)
    statistics = [Statistics(*note["statistics"]) for note in notes]
    traffic = [note["traffic"] for note in notes]
    loss_sum, examples = _trained(notes, departed)
    steps = sum(s.steps for s in statistics)
    exchanges = sum(s.exchanges for s in statistics)
    thresholds = [s.threshold for s in statistics if not math.isnan(s.threshold)]
    row = {
        "epoch": epoch,
        "loss": loss_sum / examples if examples else math.nan,
        "examples": examples,
        "seconds": seconds,
        "examples_per_s": examples / seconds,
        "density": sum(s.density_sum for s in statistics) / max(exchanges, 1),
        "threshold": sum(thresholds) / len(thresholds) if thresholds else math.nan,
        "learning_rate": _learning_rate(notes),
        "sent_bytes": sum(t["sent_bytes"] for t in traffic),
        "received_bytes": sum(t["received_bytes"] for t in traffic),
        "dense_bytes": 4 * size * exchanges,
        "staleness": sum(s.lead_sum for s in statistics) / max(steps, 1),
        "waits": _waits(traffic),
        "clipped": sum(s.clipped for s in statistics),
        "replicas": len(notes),
        "repeated_pieces": event["repeated"],
        "skipped_examples": left_out + sum(note["skipped"] for note in notes),
        "refused_messages": event["refused"] + sum(t["refused"] for t in traffic),
        "repaired_updates": sum(t["repaired"] for t in traffic),
        "withheld": sum(t["withheld"] for t in traffic),
        "folds": sum(t["folds"] for t in traffic),
    }
    return {**row, **dict.fromkeys(scores, math.nan), **validation(notes)}


def check_trained(
    epoch: int, notes: Sequence[Note], departed: Sequence[tuple[float, int]] = ()
) -> None:
    """Refuse an epoch in which all examples were left out.

    Args:
        epoch: Counted from 0.
        notes: Of all replicas.
        departed: See `_trained`.

    Raises:
        DataError: Why the first was.
    """
    skipped = sum(note["skipped"] for note in notes)
    dropped = sum(note["dropped"] for note in notes)
    if (skipped or dropped) and not _trained(notes, departed)[1]:
        why = []
        if dropped:
            why.append(
                f"drop_last=True left out {dropped} examples, as none of "
                f"{len(notes)} replicas had enough for a batch; take a smaller "
                "batch_size, fewer replicas, or drop_last=False"
            )
        if skipped:
            why.append(
                f"all {'other ' if dropped else ''}{skipped} examples were left out "
                f'(on_bad_batch="skip"), the first because {_reason(notes, 0)}'
            )
        raise DataError(f"nothing was trained on in epoch {epoch}: {'; '.join(why)}")
    scores = [note["score"] for note in notes if note["score"] is not None]
    unscored = _reason(notes, 1)
    if scores and unscored and not any(Score(*score).examples for score in scores):
        raise DataError(
            "validation: nothing was scored, as all examples were left out "
            f'(on_bad_batch="skip"), the first because {unscored}'
        )


def _reason(notes: Sequence[Note], phase: int) -> str:
    return next(
        (note["reasons"][phase] for note in notes if note["reasons"][phase]), ""
    )


def training_loss(notes: Sequence[Note]) -> float:
    """Mean over the examples of all replicas that are there.

    NaN of nothing: all who trained in the epoch may be gone.
    """
    total, examples = _trained(notes)
    return total / examples if examples else math.nan


def _trained(
    notes: Sequence[Note], departed: Sequence[tuple[float, int]] = ()
) -> tuple[float, int]:
    """Sum of the losses, and examples.

    Args:
        notes: Of those that are there.
        departed: The same of those that are not, as far as they finished pieces.
    """
    sums = [*(note["tally"][:2] for note in notes), *departed]
    return sum(loss_sum for loss_sum, _ in sums), sum(count for _, count in sums)


def _learning_rate(notes: Sequence[Note]) -> float:
    """Of the replica whose schedule is farthest: the others go on from there."""
    first = {"scheduled": 0, "learning_rate": math.nan}
    farthest = max(notes, key=lambda note: int(note["scheduled"]), default=first)
    return float(farthest["learning_rate"])


def _waits(traffic: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for counters in traffic:
        for cause, seconds in counters["waits_s"].items():
            total[cause] = total.get(cause, 0.0) + seconds
    return total


def validation(notes: Sequence[Note]) -> dict[str, float]:
    """What the agreed model was scored with, by column; empty if it was not."""
    scores = [Score(*note["score"]) for note in notes if note["score"] is not None]
    if not scores:
        return {}
    total = scores[0]
    for score in scores[1:]:
        total = total + score
    return {f"val_{name}": value for name, value in total.metrics().items()}
