"""Where the processes of a contestant meet: a small store on the host of rank 0.

It is beside what is measured: a few hundred bytes before and after the timed part, and
for those that train in step a number now and then.
"""

import json
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

PATIENCE = timedelta(minutes=30)  # a step of the slowest may take minutes


class Meeting:
    """Of so many processes.

    Args:
        address: Of rank 0's host.
        port: There.
        world: How many meet.
        hosts: Whether the store is in this process.
    """

    def __init__(self, address: str, port: int, world: int, *, hosts: bool) -> None:
        self._world = world
        self._store = TCPStore(
            address, port, is_master=hosts, timeout=PATIENCE, wait_for_workers=False
        )

    def wait_for_all(self, name: str) -> None:
        """Until all have called this."""
        if self._store.add(f"{name} came", 1) == self._world:
            self._store.set(f"{name} all", b"")
        self._store.wait([f"{name} all"])

    def say(self, name: str, value: Any) -> None:
        """Let the others read it."""
        self._store.set(name, json.dumps(value))

    def hear(self, name: str) -> Any:
        """What was said, as soon as it is."""
        return json.loads(self._store.get(name))

    def is_said(self, name: str) -> bool:
        """Whether somebody has said that."""
        return self._store.check([name])
