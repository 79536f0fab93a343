"""What makes torch's own optimizers and schedulers, read back from one just made.

So `lambda params: SGD(params, lr=0.1)` is saved as `partial(SGD, lr=0.1, ...)`. That
the two make the same is checked by making one each.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from daskdl.errors import OptionError
from daskdl.saving.references import FAILURES

Parameters = list[nn.Parameter]


def optimizer_maker(
    made: Optimizer, parameters: Parameters
) -> Callable[[Any], Optimizer]:
    """What makes optimizers like a new one.

    Args:
        made: Just made from the parameters.
        parameters: All that are trained.

    Returns:
        A partial of a class of `torch.optim`.

    Raises:
        OptionError: If it is of another class, has several groups of parameters, or
            is more than its class and defaults say.

    Example:
        >>> parameters = [nn.Parameter(torch.zeros(1))]
        >>> maker = optimizer_maker(torch.optim.SGD(parameters, lr=0.5), parameters)
        >>> maker.func.__name__, maker.keywords["lr"]
        ('SGD', 0.5)
    """
    kind: Any = type(made)
    _check_of(kind, torch.optim, "an optimizer")
    groups = made.param_groups
    if len(groups) != 1 or list(map(id, groups[0]["params"])) != [
        id(parameter) for parameter in parameters
    ]:
        raise OptionError(
            f"it makes a {kind.__name__} with {len(groups)} groups of parameters; only "
            "one group of all is saved"
        )
    taken = inspect.signature(kind).parameters
    keywords = {k: v for k, v in made.defaults.items() if k in taken}
    maker = functools.partial(kind, **keywords)
    _check_same(lambda: _settings(maker(parameters)), _settings(made), kind)
    return maker


def scheduler_maker(
    made: LRScheduler, fresh: Callable[[], Optimizer]
) -> Callable[[Optimizer], LRScheduler]:
    """What makes schedulers like a new one.

    Args:
        made: Just made, for an optimizer as `fresh` makes them.
        fresh: Makes a new optimizer.

    Returns:
        A partial of a class of `torch.optim.lr_scheduler`.

    Raises:
        OptionError: If it is of another class, or its class does not keep all that it
            was made with.
    """
    kind: Any = type(made)
    _check_of(kind, lr_scheduler, "a scheduler")
    maker = functools.partial(kind, **_read_back(made))
    _check_same(lambda: _standing(maker(fresh())), _standing(made), kind)
    return maker


def is_torchs_own(value: Any) -> bool:
    """Whether it is an optimizer, a scheduler or a function of torch, and only that.

    Whatever their arguments are, these compute.

    Example:
        >>> is_torchs_own(torch.optim.SGD), is_torchs_own(nn.functional.mse_loss)
        (True, True)
        >>> is_torchs_own(torch.hub.load)
        False
    """
    if isinstance(value, type):
        bases, places = (Optimizer, LRScheduler), (torch.optim, lr_scheduler)
        named = any(getattr(p, value.__name__, None) is value for p in places)
        return named and issubclass(value, bases)
    return bool(value.__module__ == nn.functional.__name__)


def _read_back(made: LRScheduler) -> dict[str, Any]:
    found = {}
    for name in inspect.signature(type(made)).parameters:
        if name in ("optimizer", "last_epoch", "verbose"):
            continue
        if name == "min_lr" and hasattr(made, "min_lrs"):
            same = len(set(made.min_lrs)) == 1
            found[name] = made.min_lrs[0] if same else list(made.min_lrs)
        elif hasattr(made, name):
            value = getattr(made, name)
            found[name] = (
                list(value.elements()) if isinstance(value, Counter) else value
            )
    return found


def _check_of(kind: type, package: Any, what: str) -> None:
    if getattr(package, kind.__name__, None) is not kind:
        raise OptionError(
            f"it makes {what} of the class {kind.__module__}.{kind.__qualname__}, "
            "which is not one of torch's own"
        )


def _check_same(again: Callable[[], Any], wanted: Any, kind: type) -> None:
    try:
        same = bool(again() == wanted)
    except FAILURES as error:
        raise OptionError(
            f"it makes a {kind.__name__} that is not made again: {error}"
        ) from error
    if not same:
        raise OptionError(
            f"it makes a {kind.__name__} of which not all arguments can be read back"
        )


def _settings(optimizer: Optimizer) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return optimizer.defaults, groups


def _standing(scheduler: LRScheduler) -> tuple[dict[str, Any], Any]:
    return scheduler.state_dict(), _settings(scheduler.optimizer)
