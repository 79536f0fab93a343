"""What one replica of a run goes on from, of a checkpoint with as many, more or fewer.

With as many each takes one part and is as it was. With fewer some take several, so that
no residual is lost. With more, those without a part begin at what is common, with the
optimizer of another.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from daskdl.checkpoints.parts import COMMON, Part, of_replica
from daskdl.checkpoints.plan import ResumePlan
from daskdl.data.stores.store import store_of
from daskdl.errors import SaveError
from daskdl.training.states import PARAMETERS, Resumed


class Inheritance(NamedTuple):
    """What one replica goes on from."""

    common: Mapping[str, Any]
    own: Sequence[Mapping[str, Any]]  # of the parts it takes, maybe of none
    donor: Mapping[str, Any]  # that has the optimizer; the first of `own`, if any

    @property
    def exchange(self) -> Resumed:
        """Of it, what the exchange needs."""
        own = [part["exchange"] for part in self.own]
        return Resumed(self.common["kind"], self.common["exchange"], own)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Of the module, by name, before anything is made of them."""
        common = self.common
        return {**common["tensors"], **common["exchange"].get(PARAMETERS, {})}

    @property
    def optimizer(self) -> dict[str, Any]:
        """The optimizer's state dict."""
        found: dict[str, Any] = {**self.donor, **self.common}["optimizer"]
        return found


def inherit(plan: ResumePlan, place: int, founders: int) -> Inheritance:
    """Read what a founder of a run goes on from.

    Args:
        plan: Where it is.
        place: Of the founder among all, from 0.
        founders: How many there are.

    Raises:
        SaveError: If it cannot be read.
    """
    members = plan.members
    taken = members[place::founders]
    donor = members[place % len(members)]
    common = _state(plan, COMMON)
    own = [_state(plan, of_replica(replica)) for replica in taken]
    first = own[0] if own else _state(plan, of_replica(donor))
    return Inheritance(common, own, first)


def _state(plan: ResumePlan, name: str) -> Mapping[str, Any]:
    part = Part(store_of(plan.url), name)
    stamp, state = part.read()
    if stamp != plan.stamp:
        raise SaveError(f"{part.store.url_of(part.index)} is of another checkpoint")
    return state
