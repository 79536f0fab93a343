import asyncio

import pytest

from daskdl.channel.protocol import BarrierKind
from tests.support.channels import (
    a_run,
    direct,  # noqa: F401 - a fixture
    in_thread,
    publish,
    three_workers,
    totals,
)


@pytest.mark.usefixtures("direct")
@three_workers()
async def test_its_updates_arrive_and_all_agree(c, s, *workers):
    async with a_run(c, s, *workers, routing="direct", fan_out=1) as run:
        for replica, channel in run.channels.items():
            assert publish(channel, replica + 1)

        def end(channel):
            note = {"sequence": channel.published}
            met = channel.barrier("end", note, BarrierKind.AGREE)
            published = {r: said["sequence"] for r, said in met.payloads.items()}
            channel.agree("end", published, met.gone, lambda snapshot: None)
            return totals(channel.drain())

        ends = [in_thread(end, channel) for channel in run.channels.values()]
        for replica, total in enumerate(await asyncio.gather(*ends)):
            assert total[:3] == [int(other != replica) for other in range(3)]
