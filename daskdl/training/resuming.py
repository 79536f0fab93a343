"""What one replica of a run goes on from, of a checkpoint with as many, more or fewer.

With as many each takes one part and is as it was. With fewer some take several, so that
no residual is lost. With more, those without a part begin at what is common, with the
optimizer of another.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from daskdl.checkpoints.parts import COMMON, Part, of_replica
from daskdl.checkpoints.plan import ResumePlan
from daskdl.data.stores.store import store_of
from daskdl.errors import SaveError
from daskdl.training.states import PARAMETERS, SHARER, Resumed, check_like
from daskdl.training.tensors import others_in, trained_in

# What the state of each part has at least; None: it may be anything.
_COMMON = {
    "kind": "",
    "exchange": {},
    "tensors": {},
    "stopper": {
        "verdict": None,
        "monitor": None,
        "elapsed_s": 0.0,
        "best": None,
        "best_epoch": None,
    },
    "rows": None,
}
_OWN = {
    "exchange": {},
    "schedule": None,
    "scaler": {},
    "tally": {"loss_sum": 0.0, "examples": 0, "seconds": 0.0},
    "watch": {"first": None, "last": None, "block": None, "levels": None},
    "random": {"cpu": torch.get_rng_state()},
    "steps": 0,
    "seen": 0,
    "weight": 0.0,
}


class Inheritance(NamedTuple):
    """What one replica goes on from."""

    common: Mapping[str, Any]
    own: Sequence[Mapping[str, Any]]  # of the parts it takes, maybe of none
    donor: Mapping[str, Any]  # that has the optimizer; the first of `own`, if any
    common_at: str  # the file, for messages
    own_at: Sequence[str]
    donor_at: str

    @property
    def exchange(self) -> Resumed:
        """Of it, what the exchange needs."""
        own = [part["exchange"] for part in self.own]
        kind, common = self.common["kind"], self.common["exchange"]
        return Resumed(kind, common, own, self.common_at, self.own_at)

    def check(self, module: nn.Module) -> None:
        """Refuse parts without their fields, and tensors that no module has.

        Raises:
            SaveError: Naming the file and the field.
        """
        check_like(_COMMON, self.common, f"{self.common_at}: its state")
        parts = [*zip(self.own_at, self.own, strict=True), (self.donor_at, self.donor)]
        for at, part in parts:
            check_like(_OWN, part, f"{at}: its state")
        if "optimizer" not in {**self.donor, **self.common}:
            raise SaveError(f"{self.common_at}, {self.donor_at}: optimizer is missing")
        own: dict[str, Any] = {"tensors": others_in(module)}
        if self.common["kind"] != SHARER:
            own["exchange"] = {PARAMETERS: trained_in(module)}
        check_like(own, self.common, f"{self.common_at}: it")

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
    common, common_at = _state(plan, COMMON)
    read = [_state(plan, of_replica(replica)) for replica in taken]
    first, first_at = read[0] if read else _state(plan, of_replica(donor))
    own, own_at = [state for state, _ in read], [at for _, at in read]
    return Inheritance(common, own, first, common_at, own_at, first_at)


def _state(plan: ResumePlan, name: str) -> tuple[Mapping[str, Any], str]:
    part = Part(store_of(plan.url), name)
    at = part.store.url_of(part.index)
    stamp, state = part.read()
    if stamp != plan.stamp:
        raise SaveError(f"{at} is of another checkpoint")
    return state, at
