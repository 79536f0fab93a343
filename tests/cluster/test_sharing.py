"""Options of `GradientSharing`: each changes what it says."""

from dataclasses import dataclass
from pathlib import Path

import dask.array as da
import pytest
import torch
from distributed import get_worker
from torch import nn

from daskdl import AdaptiveThreshold, Callback, GradientSharing
from daskdl.channel.protocol import NAME
from tests.support.problems import SIZE, kept, mlp, plain, rows, start_of, trainer
from tests.support.recording import Notes, delivered, vector

X, Y = rows()


class TestSharing:
    @pytest.mark.parametrize(
        ("scale", "factor"), [("mean", 0.5), ("sum", 1), (0.25, 0.25)]
    )
    @pytest.mark.parametrize("apply", ["eager", "strict"])
    def test_update_scale_multiplies_updates(self, client, apply, scale, factor):
        # One step of each replica, from the same start, on half of the rows each.
        own = trainer(
            client,
            optimizer=plain,
            master=kept(apply=apply, update_scale=scale, max_staleness=0),
        )
        own.fit(X, Y, batch_size=240)

        start = start_of(mlp)
        outputs = start(torch.from_numpy(X))
        nn.functional.cross_entropy(outputs, torch.from_numpy(Y)).backward()
        gradient = torch.cat([p.grad.double().reshape(-1) for p in start.parameters()])
        # The two halves' means add up to twice the mean of all.
        expected = vector(start) - 0.02 * factor * 2 * gradient
        torch.testing.assert_close(delivered(own), expected, rtol=0, atol=4 * 2.0**-24)

    def test_a_number_scales_one_replica_too(self, lone_client):
        moved = []
        for scale in ("mean", 0.5):
            own = trainer(
                lone_client,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                master=kept(update_scale=scale),
            )
            own.fit(X, Y, batch_size=480)
            moved.append(vector(own.model_) - vector(start_of(mlp)))

        torch.testing.assert_close(moved[1], moved[0] / 2, rtol=0, atol=1e-7)

    @pytest.mark.parametrize(("every", "exchanges"), [(1, 15), (4, 4), (5, 3), (99, 1)])
    def test_exchange_every_so_many_steps(self, client, every, exchanges):
        # 30 batches, 15 for each of two: and what is left over at the end.
        master = kept(exchange_every=every, max_staleness=0)

        history = trainer(client, master=master).fit(X, Y, batch_size=16)

        assert history[0]["dense_bytes"] == 2 * exchanges * 4 * SIZE

    def test_several_replicas_on_each_worker(self, client, tmp_path):
        notes = Notes(tmp_path)
        own = trainer(client, master=kept(replicas_per_worker=2), callbacks=[notes])

        history = own.fit(X, Y, epochs=6, batch_size=8)

        lines = notes.read()
        pids = {line["replica"]: line["pid"] for line in lines}
        assert sorted(pids) == [0, 1, 2, 3]
        assert len(set(pids.values())) == 2
        assert pids[0] == pids[2] != pids[1] == pids[3]
        assert history.column("replicas") == [4] * 6
        assert own.evaluate(X, Y)["accuracy"] > 0.85

    @pytest.mark.parametrize(
        "option", [{"replicas_per_worker": "auto"}, {"routing": "plain"}]
    )
    def test_other_choices_train(self, client, option):
        expected = max(2, 2 * torch.cuda.device_count())

        history = trainer(client, master=kept(**option)).fit(X, Y, epochs=2)

        assert history.column("replicas") == [expected] * 2
        assert history[1]["loss"] < history[0]["loss"]

    def test_clipping_is_counted_and_keeping_is_not(self, client):
        small = AdaptiveThreshold(initial=1e-5)
        clipped = [
            sum(
                trainer(client, master=master)
                .fit(X, Y, batch_size=16)
                .column("clipped")
            )
            for master in (GradientSharing(small), kept(threshold=small))
        ]

        assert clipped[0] > 0.01
        assert clipped[1] == 0

    def test_no_more_replicas_than_batches(self, client):
        history = trainer(client).fit(X[:20], Y[:20], epochs=2, batch_size=32)

        assert history.column("replicas") == [1, 1]
        assert history.column("examples") == [20, 20]

    def test_a_replica_without_a_piece_waits_for_the_others(self, client):
        x, y = da.from_array(X, chunks=(480, 20)), da.from_array(Y, chunks=480)

        history = trainer(client).fit(x, y, epochs=2, batch_size=16)

        assert history.column("examples") == [480, 480]
        assert history.column("replicas") == [2, 2]


@dataclass
class Routings(Callback):
    """Writes down which way the updates of each replica go."""

    folder: Path

    def on_step_end(self, step):
        for (_, replica), link in get_worker().extensions[NAME].endpoints.items():
            (self.folder / str(replica)).write_text(link.connection.spec.routing)


def test_many_replicas_on_few_workers_are_relayed_to(client, tmp_path):
    own = trainer(
        client, master=kept(replicas_per_worker=5), callbacks=[Routings(tmp_path)]
    )

    history = own.fit(X, Y, batch_size=8)

    assert history.column("replicas") == [10]
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told == {str(replica): "plain" for replica in range(10)}
