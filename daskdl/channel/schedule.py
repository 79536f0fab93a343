"""Which pieces there are, and who trains on which in the epoch that runs. No I/O."""

from collections.abc import Callable, Mapping, Sequence

from daskdl.channel.leases import Leases, piece_order


class Schedule:
    """The leases of each phase, epoch after epoch.

    Args:
        pieces: For each phase ("train", "validation"), the Dask keys of its pieces.
        seed: Of the order of the training pieces; None keeps their order.
        epochs_before: Of earlier fits, so that each has an order of its own.
    """

    def __init__(
        self,
        pieces: Mapping[str, Sequence[str]],
        seed: int | None,
        epochs_before: int,
    ) -> None:
        self._keys = {phase: list(keys) for phase, keys in pieces.items()}
        self._seed = seed
        self._epochs_before = epochs_before
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
            seed = self._seed if phase == "train" else None
            turn = self._epochs_before + epoch
            order = piece_order(len(self._keys[phase]), turn, seed)
            self._leases[phase] = (epoch, Leases(order, share_among))
        return self._leases[phase][1]

    def key(self, phase: str, piece: int) -> str:
        """The Dask key of a piece, as it is now."""
        return self._keys[phase][piece]

    def replace(self, phase: str, piece: int, key: str) -> None:
        """A piece was lost with its worker, and has been started again."""
        self._keys[phase][piece] = key

    def nearest(
        self, phase: str, is_near: Callable[[str], bool]
    ) -> Callable[[int], bool]:
        """The same question of a piece instead of its key."""
        keys = self._keys[phase]
        return lambda piece: is_near(keys[piece])

    def lose(self, replica: int) -> None:
        """What a replica held, or would have got, is free for the others."""
        for _, leases in self._leases.values():
            leases.lose(replica)

    @property
    def repeated(self) -> int:
        """Training pieces handed out again because their replica was lost."""
        return self._leases["train"][1].repeated if "train" in self._leases else 0
