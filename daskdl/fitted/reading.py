"""What a trainer is made with, from JSON; see :mod:`.arguments`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from daskdl.data.normalising.normalisation import Normalisation
from daskdl.data.options import Both
from daskdl.errors import OptionError, SaveError
from daskdl.fitted.arguments import MADE, NAMES, plain_with
from daskdl.saving import layers
from daskdl.saving.makers import decode_maker
from daskdl.saving.module_state import ModuleState
from daskdl.saving.plain import Json, Plain
from daskdl.saving.trust import Trust


def decode_arguments(
    content: Mapping[str, Json],
    passed: Mapping[str, Any],
    extra: Mapping[str, Tensor],
    trust: Trust,
) -> dict[str, Any]:
    """Read the arguments of a trainer; a described model is left as its layers.

    Args:
        content: What `encode_arguments` wrote, or something damaged.
        passed: By name, in place of what is there.
        extra: The tensors among them.
        trust: What may be imported, and called with arguments.

    Raises:
        SaveError: If it is damaged.
        OptionError: Naming each that has to be passed, and why.
    """
    unknown = [name for name in content if name not in NAMES]
    if unknown:
        raise SaveError(f"a trainer has no argument {unknown[0]!r:.80}")
    _check_passed(passed)
    plain = plain_with(dict(extra), trust)
    read, missing = dict(passed), {}
    for name in NAMES:
        if name in passed or name not in content:
            continue
        try:
            read[name] = _decoded(name, content[name], plain)
        except OptionError as error:
            missing[name] = str(error)
    if missing:
        raise OptionError(_asking(missing))
    return read


def _check_passed(passed: Mapping[str, Any]) -> None:
    wrong = [name for name in passed if name not in NAMES]
    if wrong:
        raise OptionError(
            f"Trainer has no argument {wrong[0]!r}; of those that it has, any can be "
            f"passed: {', '.join(NAMES)}"
        )


def _asking(missing: Mapping[str, str]) -> str:
    why = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
    return (
        f"pass {' and '.join(missing)} to Trainer.load as to Trainer: what was saved "
        f"does not make them without code ({why})"
    )


def _decoded(name: str, content: Json, plain: Plain) -> Any:
    if "pass" in content:
        raise OptionError(content["pass"])
    if set(content) == {"value"}:
        return plain.decode(content["value"])
    if name not in MADE:
        raise SaveError(f"{name} is written as {content!r:.80}")
    if name == "transform":
        return _decoded_transform(content, plain)
    if name == "model" and set(content) == {"layers"}:
        return layers.build(content["layers"])
    if name == "loss" and "layers" in content:
        return _decoded_module(content, plain)
    return decode_maker(content, MADE[name], plain)


def _decoded_transform(content: Json, plain: Plain) -> Any:
    if set(content) == {"normaliser"}:
        try:
            return Normalisation.from_dict(content["normaliser"])
        except OptionError as error:
            raise SaveError(f"the normaliser is damaged: {error}") from error
    if set(content) == {"both"}:
        first, then = (_decoded_transform(one, plain) for one in content["both"])
        return Both(first, then)
    return decode_maker(content, tuple, plain)


def _decoded_module(content: Mapping[str, Json], plain: Plain) -> nn.Module:
    module = layers.build(content["layers"])
    tensors = plain.decode(content["tensors"])
    ModuleState.from_json(content["state"], tensors, {}).put_into(module)
    return module
