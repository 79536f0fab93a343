"""The graph of a functional model as Keras 2 writes it, rewritten as Keras 3 does.

A layer has a list of *nodes*, one for each time it is called. Keras 2 writes a node as
its first argument, in which each tensor is ``[layer, node, tensor, other arguments]``;
Keras 3 writes ``{"args": ..., "kwargs": ...}``. Nodes of a nested model count from 1 in
Keras 2, since the first one is its own.
"""

from collections.abc import Mapping, Set
from typing import Any

JSON = Any  # what `json.loads` returns

_CONSTANT = "_CONSTANT_VALUE"  # Keras 2 writes it where else the name of a layer is


def modern_graph(config: Mapping[str, JSON]) -> dict[str, JSON]:
    """Rewrite the nodes of a functional model; those of Keras 3 stay as they are.

    Args:
        config: Of the model, whose layers have been rewritten; not changed.

    Raises:
        LookupError: If something is missing.
        TypeError: If something is of another kind than Keras writes.
        AttributeError: Likewise.
    """
    layers = config["layers"]
    if not any(isinstance(node, list) for layer in layers for node in _nodes(layer)):
        return dict(config)
    names = {layer["name"] for layer in layers}
    nested = {layer["name"]: layer["class_name"] for layer in layers if _nests(layer)}
    made = []
    for layer in layers:
        nodes = [_node(node, names, nested.keys()) for node in _nodes(layer)]
        made.append({**layer, "inbound_nodes": nodes})
    # Keras 3 takes off the one of a nested functional model by itself here.
    counted = {name for name, kind in nested.items() if kind == "Sequential"}
    outputs = _outputs(config["output_layers"], counted)
    return {**config, "layers": made, "output_layers": outputs}


def _nodes(layer: Mapping[str, JSON]) -> JSON:
    return layer["inbound_nodes"]


def _nests(layer: Mapping[str, JSON]) -> bool:
    """Whether it is a model whose first node is its own."""
    return layer["class_name"] in ("Functional", "Sequential")


def _node(node: JSON, names: Set[str], nested: Set[str]) -> dict[str, JSON]:
    kwargs: dict[str, JSON] = {}
    first = _first_argument(node, nested, kwargs)
    if isinstance(first, list) and len(first) == 1:
        (first,) = first
    others = {key: _other(value, names, nested) for key, value in kwargs.items()}
    return {"args": [first], "kwargs": others}


def _first_argument(part: JSON, nested: Set[str], kwargs: dict[str, JSON]) -> JSON:
    """Rewrite tensors in any structure; other arguments with them are put aside."""
    if isinstance(part, dict):
        return {k: _first_argument(v, nested, kwargs) for k, v in part.items()}
    if not _is_reference(part):
        return [_first_argument(inner, nested, kwargs) for inner in part]
    if len(part) > 3:
        kwargs.update(part[3].items())
    return part[2] if part[0] == _CONSTANT else _tensor(part, nested)


def _other(part: JSON, names: Set[str], nested: Set[str]) -> JSON:
    """Rewrite what may be a tensor, or anything else."""
    if isinstance(part, dict):
        return {key: _other(value, names, nested) for key, value in part.items()}
    if _is_reference(part) and part[0] in names:
        return _tensor(part, nested)
    return [_other(p, names, nested) for p in part] if isinstance(part, list) else part


def _is_reference(part: JSON) -> bool:
    """Whether it is ``[layer, node, tensor]``, with or without other arguments."""
    return (
        isinstance(part, list)
        and len(part) in (3, 4)
        and isinstance(part[0], str)
        and isinstance(part[1], int)
    )


def _tensor(reference: list[JSON], nested: Set[str]) -> dict[str, JSON]:
    layer, node, tensor = reference[:3]
    history = [layer, max(node - 1, 0) if layer in nested else node, tensor]
    # Keras takes the tensor that the layer made; shape and dtype are not looked at.
    config = {"shape": [], "dtype": "float32", "keras_history": history}
    return {"class_name": "__keras_tensor__", "config": config}


def _outputs(part: JSON, counted: Set[str]) -> JSON:
    if isinstance(part, dict):
        return {key: _outputs(inner, counted) for key, inner in part.items()}
    if _is_reference(part):
        layer, node, tensor = part[:3]
        return [layer, max(node - 1, 0) if layer in counted else node, tensor]
    return [_outputs(inner, counted) for inner in part]
