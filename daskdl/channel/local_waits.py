"""Where a training thread waits for the other threads of its run."""

from collections.abc import Callable

from typing_extensions import override

from daskdl.channel.endpoint import Endpoint
from daskdl.channel.inbox import Inbox
from daskdl.channel.local_run import LocalRun
from daskdl.channel.waits import Waits


class LocalWaits(Waits):
    """The waits of one replica among threads.

    What has no bound of its own, because others have work to do first, ends when one
    of them has said nothing for longer than a piece of data and a step may take:
    there is no scheduler that would give it up.

    Args:
        run: That it is in, and has joined.
        inbox: Its own.
        endpoint: Which replica it is, and the bounds.
    """

    def __init__(self, run: LocalRun, inbox: Inbox, endpoint: Endpoint) -> None:
        super().__init__(inbox, endpoint)
        self._run = run

    @override
    def _until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        run = self._run
        with run.changed, run.waiting(self._replica):
            if timeout_s is not None:
                return super()._until(ready, timeout_s)
            while not super()._until(ready, run.patience_s(self.patience)):
                run.look_for_silent(self.patience)
            return True  # or the run was given up, which ends the wait too
