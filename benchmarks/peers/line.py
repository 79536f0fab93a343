"""What a contestant prints: one line of JSON."""

import json
from typing import Any

from benchmarks.peers.arguments import Arguments
from benchmarks.peers.meeting import Meeting


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """All processes of a contestant together.

    Returns:
        Samples/s of all together; bytes per step of one process, in the mean, of its
        host's interface; all else is rank 0's.

    Example:
        >>> found = {"rows": 640, "seconds": 2.0, "steps": 10, "sent": 5000,
        ...     "received": 0, "startup_s": 1.0, "warm_up_s": 1.0, "curve": [],
        ...     "reached_s": None}
        >>> summary([found, found])["samples_per_s"]
        640.0
    """
    first, steps = reports[0], sum(own["steps"] for own in reports)
    return {
        "samples_per_s": sum(own["rows"] / own["seconds"] for own in reports),
        "seconds": first["seconds"],
        "warm_up_s": first["warm_up_s"],
        "startup_s": first["startup_s"],
        "steps": steps,
        "sent_kb_per_step": sum(own["sent"] for own in reports) / steps / 1e3,
        "received_kb_per_step": sum(own["received"] for own in reports) / steps / 1e3,
        "curve": first["curve"],
        "reached_s": first["reached_s"],
    }


def put(own: Arguments, meeting: Meeting, **more: Any) -> None:
    """Print it, with more that this contestant knows, when all have reported."""
    wanted = own.world if own.target is None else 1
    reports = [meeting.hear(f"report {rank}") for rank in range(wanted)]
    print(json.dumps(summary(reports) | more), flush=True)
