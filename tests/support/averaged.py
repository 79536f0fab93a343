"""Parameter averaging as one would write it down, in one thread and without daskdl."""

import copy

import torch
from torch import nn

from daskdl.channel.leasing import Range, shared_out


def averaged_loop(start, x, y, *, replicas, batch_size, epochs, frequency, **more):
    """Train copies of a model, and average them.

    Args:
        start: The model at its start, and a function that makes an optimizer.
        more: `average_optimizer` and `outer`, as options of the master.

    Returns:
        The model that all have at the end.
    """
    model, optimizer = start
    modules = [copy.deepcopy(model).train() for _ in range(replicas)]
    optimizers = [optimizer(module.parameters()) for module in modules]
    common = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    outer = more["outer"](common) if more.get("outer") else None
    cut = shared_out([Range(0, 0, len(x))], batch_size, replicas)

    for _ in range(epochs):
        shares = [
            [
                slice(at, min(at + batch_size, stop))
                for _, start, stop in share
                for at in range(start, stop, batch_size)
            ]
            for share in cut
        ]
        while any(shares):
            weights = [0] * replicas
            for replica, share in enumerate(shares):
                for _ in range(min(frequency, len(share))):
                    rows = share.pop(0)
                    step(modules[replica], optimizers[replica], x[rows], y[rows])
                    weights[replica] += rows.stop - rows.start
            average_(modules, weights)
            if more.get("average_optimizer", True):
                average_optimizers_(optimizers, weights)
            if outer is not None:
                outer_step_(modules, common, outer)
    return modules[0]


def step(module, optimizer, x, y):
    optimizer.zero_grad()
    output = module(torch.from_numpy(x))
    nn.functional.cross_entropy(output, torch.from_numpy(y)).backward()
    optimizer.step()


def average_(modules, weights):
    states = [module.state_dict() for module in modules]
    mean = {name: weighted([s[name] for s in states], weights) for name in states[0]}
    for module in modules:
        module.load_state_dict(mean)


def average_optimizers_(optimizers, weights):
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for number in states[0]:
        for name in states[0][number]:
            mean = weighted([s[number][name] for s in states], weights)
            for state in states:
                state[number][name].copy_(mean)


def weighted(tensors, weights):
    if not tensors[0].is_floating_point() or tensors[0].dim() == 0:
        return torch.stack(tensors).max(0).values
    shares = zip(tensors, weights, strict=True)
    return sum(t.double() * (w / sum(weights)) for t, w in shares if w).to(
        tensors[0].dtype
    )


def outer_step_(modules, common, outer):
    for parameter, mean in zip(common, modules[0].parameters(), strict=True):
        parameter.grad = parameter.detach() - mean.detach()
    outer.step()
    with torch.no_grad():
        for module in modules:
            for parameter, now in zip(module.parameters(), common, strict=True):
                parameter.copy_(now)
