"""Who reaches a port and sends junk is refused and counted, and harms nobody."""

import logging

import pytest

from daskdl import SaveError
from tests.support.channels import RUN, a_run, in_thread, publish, two_workers

JUNK = (None, 7, -1, "x", [1], {"a": 1}, [[1]], b"bytes", 1e400, True, "y" * 10**5)
TO_SCHEDULER = {
    "daskdl_open": ("plan", "client"),
    "daskdl_fail": ("replica", "failure"),
    "daskdl_stop": ("reason",),
    "daskdl_seat": ("worker", "replicas"),
    "daskdl_gather": ("replica", "key", "note", "told", "kind"),
    "daskdl_publish": ("origin", "items", "step", "done", "standing"),
    "daskdl_lease": ("replica", "phase", "epoch", "finished", "wait"),
    "daskdl_join": ("replica", "version"),
}
TO_WORKER = {
    "daskdl_deliver": ("replica", "items"),
    "daskdl_share": ("items", "shares"),
    "daskdl_repair": ("replica", "origin", "sequences"),
}


@two_workers()
async def test_junk_in_any_field_is_refused_and_a_run_goes_on(c, s, a, b, caplog):
    async with a_run(c, s, a, b) as run:
        with caplog.at_level(logging.WARNING):
            for operation, names in TO_SCHEDULER.items():
                for junk in JUNK:
                    fields = {**dict.fromkeys(names, junk), "colour": "red"}
                    answer = await run.ask(operation, run=RUN, **fields)
                    assert answer["status"] == "refused", (operation, junk)
                    assert len(answer["reason"]) < 1000
            for operation, names in TO_WORKER.items():
                for junk in JUNK:
                    fields = {**dict.fromkeys(names, junk), "colour": "red"}
                    answer = await getattr(c.rpc(a.address), operation)(
                        run=RUN, **fields
                    )
                    assert answer["status"] in ("refused", "unknown")

        assert run.record.refused == len(TO_SCHEDULER) * len(JUNK)
        assert run.record.stopped is None
        assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
        assert publish(run.channels[0], 5)
        await in_thread(run.channels[1].wait_for_updates, {0: 1})


@pytest.mark.parametrize("name", ["weight" * 20_000])
def test_a_message_is_never_longer_than_a_screen(name):
    assert len(str(SaveError(f"the tensor {name} has no place"))) <= 2000
