"""torch's generators, put back when the replicas of a process have left.

A generator belongs to the whole process: the first replica that uses it notes its
state, the last one to leave puts it back.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

_lock = threading.Lock()
_users: dict[torch.device, list[Tensor]] = {}  # the state found, once for each inside


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Leave the generators as they were: the CPU's, and that of the device."""
    devices = {torch.device("cpu"), device}
    with _lock:
        for each in devices:
            users = _users.setdefault(each, [])
            users.append(users[0] if users else _state(each))
    try:
        yield
    finally:
        with _lock:
            for each in devices:
                former = _users[each].pop()
                if not _users[each]:
                    _restore(each, former)


def generators(device: torch.device) -> dict[str, Tensor]:
    """The states of the CPU's generator and of the device's, as they are now."""
    return {each.type: _state(each) for each in {torch.device("cpu"), device}}


def restore_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on from what `generators` made, as far as there is such a device."""
    for each in {torch.device("cpu"), device}:
        if each.type in states:
            _restore(each, states[each.type])


def _state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _restore(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
