"""The better of two models at the end of an epoch: shared, or shared plus residuals.

`GradientSharing.compare_models` turns the comparison on. This module decides whether a
comparison is worth its time, exchanges scores, and sends and applies residuals.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from daskdl import codec
from daskdl.channel.base import BarrierResult, Channel, Stopped
from daskdl.channel.protocol import BarrierKind
from daskdl.compression.kernels import GUARD
from daskdl.compression.replica_vector import Counts, ReplicaVector
from daskdl.errors import CodecError
from daskdl.evaluation.evaluate import Score
from daskdl.training.base import Choice

# Residuals are sent only if they could lower the loss by this fraction.
PROMISING = 0.01
COMPARING = 0.01  # fraction of a replica's time that comparisons may take
SENDING = 0.03  # fraction of a replica's time that sending residuals may take


def loss_of(gathered: BarrierResult, members: Iterable[int], name: str) -> float:
    """Return the mean loss of scores in the payloads; NaN without examples."""
    scores = [Score(*gathered.payloads[replica][name]) for replica in members]
    total = sum(scores, start=Score())
    weight = total.examples + total.surplus
    return total.loss_sum / weight if weight else math.nan


class ModelComparison:
    """One replica's side of the comparison; no replica joins during a comparison.

    Args:
        vector: The replica's vectors; a better model is applied to them.
        channel: The replica's channel.
        replica: Number of the replica.
        lockstep: Whether results must be reproducible, so that no measured time may
            decide.
    """

    def __init__(
        self, vector: ReplicaVector, channel: Channel, replica: int, *, lockstep: bool
    ) -> None:
        self._vector = vector
        self._channel = channel
        self._replica = replica
        self._lockstep = lockstep
        self._now = channel.clock.now
        self._compared_at = math.nan  # time of the last comparison, or the first step
        self._comparing_s = 0.0  # duration of the last comparison
        self._sending_s = math.nan  # part of it for sending residuals

    def begin(self) -> None:
        """Start the clock, at the first step."""
        if math.isnan(self._compared_at):
            self._compared_at = self._now()

    @property
    def is_affordable(self) -> bool:
        """Whether comparing models now would take at most `COMPARING` of the time."""
        since_s = self._now() - self._compared_at  # NaN before the first step
        return self._lockstep or not self._comparing_s > COMPARING * since_s

    def choose(self, interval: int, step: int, score: Callable[[], Score]) -> Choice:
        """Continue from shared, or from shared plus all residuals if that is better.

        Sending all residuals takes a byte per parameter, so the replicas first estimate
        the gain. Each one scores shared, shared plus its own residual, and local. For
        small residuals in independent directions, the gain of n replicas is n times the
        gain of one. For large residuals in one direction, local shows the gain: with
        ``update_scale="mean"`` it is shared plus n times the residual.

        Args:
            interval: Number of the sync interval that has ended.
            step: Steps completed in this fit.
            score: Scores the module as it is.
        """
        began = self._now()
        try:
            return self._choose(interval, step, score, began - self._compared_at)
        finally:
            self._compared_at = self._now()
            self._comparing_s = self._compared_at - began

    def _choose(
        self, interval: int, step: int, score: Callable[[], Score], since_s: float
    ) -> Choice:
        vector, channel = self._vector, self._channel
        quantized = codec.quantize(vector.residual_counts(GUARD))
        residual_N = codec.counts_of(quantized)
        scores = {"local": score()}
        with vector.showing_shared():
            scores["shared"] = score()
        with vector.showing_shared(residual_N):
            scores["own"] = score()
        sending_s = 0.0 if self._lockstep else self._expected_sending_s()
        key = f"choose {interval}"
        note: dict[str, object] = {name: list(value) for name, value in scores.items()}
        note["sending_fraction"] = sending_s / since_s
        gathered = channel.barrier(key, note, BarrierKind.AGREE)
        members = sorted(gathered.payloads.keys() - gathered.gone.keys())
        shared, moved, local = (
            loss_of(gathered, members, name) for name in ("shared", "own", "local")
        )
        gain = max(len(members) * (shared - moved), shared - local)
        kept = Choice(shared, shared - gain)
        allowed = max(SENDING, gain / abs(shared)) if shared else SENDING
        if (
            # A joining replica already has a snapshot of the present shared.
            gathered.counted["present"] != len(members)
            or len(members) < 2
            or not gain > PROMISING * abs(shared)
            or any(
                payload["sending_fraction"] > allowed
                for payload in gathered.payloads.values()
            )
        ):
            return kept

        stamp = codec.Stamp(channel.run, self._replica, interval + 1, step)
        frame = codec.encode_dense(stamp, vector.grid, quantized)
        started = self._now()
        channel.publish_blob(key, {"residual": frame})
        others_N = self._fetch_residuals(members, key)
        self._sending_s = self._now() - started
        if others_N is None:
            delivered = Score()
        else:
            with vector.showing_shared(residual_N + others_N):
                delivered = score()
        ready = {"delivered": list(delivered), "complete": others_N is not None}
        gathered = channel.barrier(f"{key}, sent", ready, BarrierKind.AGREE)
        channel.drop_blobs()
        if others_N is None or not all(
            o["complete"] for o in gathered.payloads.values()
        ):
            return kept
        if gathered.payloads.keys() != set(members):
            return kept
        kept = kept._replace(delivered_loss=loss_of(gathered, members, "delivered"))
        if not kept.delivered_loss < shared:
            return kept
        # A replica that leaves sends its residual, unless the others apply it. They
        # do so once this replica has arrived at the next barrier.
        channel.check()  # a replica that stops here leaves with its residual
        try:
            gathered = channel.barrier(f"{key}, known", {}, BarrierKind.AGREE)
        except Stopped:
            vector.apply_counts_(residual_N, from_residual=True)
            raise
        if gathered.payloads.keys() != set(members):
            return kept
        vector.apply_counts_(residual_N, from_residual=True)
        vector.apply_counts_(others_N)
        return kept._replace(delivered=True)

    def _expected_sending_s(self) -> float:
        """Return how long sending all residuals took last, or would take.

        NaN if it is unknown.
        """
        if not math.isnan(self._sending_s):
            return self._sending_s
        nbytes = len(self._channel.peers()) * self._vector.size
        return nbytes * self._channel.link_s_per_byte()

    def _fetch_residuals(self, members: Sequence[int], name: str) -> Counts | None:
        """Return the sum of the others' residuals; None if one is not available."""
        vector, channel = self._vector, self._channel
        place = members.index(self._replica)
        total_N = np.zeros(vector.size, np.int64)
        for replica in (*members[place + 1 :], *members[:place]):
            blob = channel.fetch_blob(replica, name)
            if blob is None:
                return None
            try:
                frame = blob["residual"].tobytes()
                update = codec.decode(frame, run=channel.run, size=vector.size)
            except (CodecError, KeyError):
                return None
            if not isinstance(update, codec.DenseUpdate) or update.grid != vector.grid:
                return None
            total_N += update.counts_N
        # Beyond this limit, the sum with this replica's residual may exceed int32.
        if np.abs(total_N).max() >= GUARD:
            return None
        return total_N.astype(np.int32)
