"""What daskdl's replicas have agreed on, found by training thread."""

from copy import deepcopy
from threading import get_ident

from torch import nn
from typing_extensions import override

import daskdl
from daskdl.training.base import Exchange, ReplicaContext

_exchanges: dict[int, Exchange] = {}  # by training thread


class Sharing(daskdl.GradientSharing):
    """Gradient sharing whose agreed model can be copied."""

    @override
    def attach(self, context: ReplicaContext) -> Exchange:
        return _kept(super().attach(context))


class Averaging(daskdl.ParameterAveraging):
    """Parameter averaging whose model can be copied."""

    @override
    def attach(self, context: ReplicaContext) -> Exchange:
        return _kept(super().attach(context))


def _kept(exchange: Exchange) -> Exchange:
    _exchanges[get_ident()] = exchange
    return exchange


def copied() -> nn.Module:
    """Copy the model that `fit` would return now; for the training thread."""
    exchange = _exchanges[get_ident()]
    with exchange.showing_agreed():
        return deepcopy(exchange.context.module)
