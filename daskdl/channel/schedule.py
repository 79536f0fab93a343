"""Which parts there are, and who trains on which in the epoch that runs. No I/O."""

from collections.abc import Callable, Mapping, Sequence

from daskdl.channel.first_come import FirstCome
from daskdl.channel.fixed_shares import FixedShares
from daskdl.channel.leases import IsNear, Lease, Leases, part_order
from daskdl.channel.plan import WHOLE_EPOCHS, Extent, Laps


class Schedule:
    """The leases of each phase, epoch after epoch.

    Args:
        extents: Of each phase ("train", "validation").
        seed: Of the order of the training parts; None keeps their order.
        epochs_before: Of earlier fits, so that each has an order of its own.
        laps: How the training epochs are divided.
    """

    def __init__(
        self,
        extents: Mapping[str, Extent],
        seed: int | None,
        epochs_before: int,
        laps: Laps = WHOLE_EPOCHS,
    ) -> None:
        self._extents = extents
        self._keys = {phase: list(extent.keys) for phase, extent in extents.items()}
        self._held = {phase for phase, keys in self._keys.items() if any(keys)}
        self._seed = seed
        self._epochs_before = epochs_before
        self._laps = laps
        self._left = laps.left  # of the first epoch
        self._leases: dict[str, tuple[int, Leases]] = {}

    def open(self, phase: str, epoch: int, share_among: Sequence[int] | None) -> Leases:
        """The leases of an epoch; they are made when first asked for.

        Args:
            phase: Of the data.
            epoch: Counted from 0; never one before the last one asked for.
            share_among: Replicas with a fixed share each, if it is made now.

        Raises:
            ValueError: If the epoch is over.
        """
        current = self._leases[phase][0] if phase in self._leases else -1
        if epoch < current:
            raise ValueError(f"epoch {epoch} of {phase} is over, this is {current}")
        if epoch > current:
            self._leases[phase] = (epoch, self._make(phase, epoch, share_among))
        return self._leases[phase][1]

    def _make(
        self, phase: str, epoch: int, share_among: Sequence[int] | None
    ) -> Leases:
        extent = self._extents[phase]
        trains = phase == "train"
        seed = self._seed if trains else None
        order = part_order(len(extent.rows), self._epochs_before + epoch, seed)
        left, lap_rows = None, None
        if trains:
            left, self._left = self._left, None
            lap_rows = self._laps.rows
        if share_among is not None:
            return FixedShares(order, extent, share_among, lap_rows, left)
        if lap_rows is not None:
            lap_rows *= self._laps.replicas
        return FirstCome(order, extent, lap_rows, left)

    def end_lap(self) -> None:
        """Let all that train come together, as soon as is possible."""
        if "train" in self._leases:
            self._leases["train"][1].end_lap()

    def begin_lap(self) -> None:
        """All have come together: go on."""
        if "train" in self._leases:
            self._leases["train"][1].begin_lap()

    def key(self, phase: str, part: int) -> str:
        """The Dask key of a part, as it is now; "" if no worker holds it."""
        return self._keys[phase][part]

    def check_held(self, phase: str, part: int) -> None:
        """Refuse a part that no worker has ever held.

        Raises:
            ValueError: If none has, or a LookupError if there is no such part.
        """
        if not self.key(phase, part):
            raise ValueError(f"no worker holds part {part} of {phase}")

    def keys(self, phase: str, lease: Lease) -> dict[int, str]:
        """The keys of all parts that a lease names, the one ahead too."""
        parts = dict.fromkeys(one.part for one in lease.ranges)
        if lease.ahead is not None:
            parts.setdefault(lease.ahead)
        return {part: self.key(phase, part) for part in parts}

    def replace(self, phase: str, part: int, key: str) -> None:
        """A part was lost with its worker, and has been started again."""
        self._keys[phase][part] = key

    def nearest(self, phase: str, is_near: Callable[[str], bool]) -> IsNear | None:
        """The same question of a part instead of its key; None if none has one."""
        keys = self._keys[phase]
        if phase not in self._held:
            return None
        return lambda part: keys[part] != "" and is_near(keys[part])

    def lose(self, replica: int) -> None:
        """What a replica held, or would have got, is free for the others."""
        for _, leases in self._leases.values():
            leases.lose(replica)

    @property
    def repeated(self) -> int:
        """Training pieces handed out again because their replica was lost."""
        return self._leases["train"][1].repeated if "train" in self._leases else 0
