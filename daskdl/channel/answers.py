"""What the answers to all requests have in common: whether the run goes on."""

from typing import Any

from daskdl.channel.messages import Answer
from daskdl.channel.run import RunRecord


class GoneError(Exception):
    """A replica that has left, or was given up, still asks for something."""


def check_present(replica: Any, record: RunRecord) -> None:
    """Refuse who does not take part.

    Raises:
        GoneError: If the replica has taken part.
        ValueError: If it never did.
    """
    if replica in record.members.gone:
        raise GoneError(f"replica {replica} is not a member any more")
    if replica not in record.outboxes:
        raise ValueError(f"replica {replica!r} is not a member of this run")


def answer(record: RunRecord, **fields: Any) -> dict[str, Any]:
    """The fields of an answer, and the word to leave if the run was stopped."""
    if record.stopped is not None:
        return {"status": Answer.STOPPED.value, "reason": record.stopped, **fields}
    return {"status": Answer.OK.value, **fields}
