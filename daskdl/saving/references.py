"""Classes and functions by where they are imported from: ``module:Qualified.name``.

Importing a module executes it, and it may be one that came with the file. So a name in
a file imports nothing unless its reader says so: it stands for something that this
process has imported already. And it is looked at closely: nothing of the standard
library, nothing of the script that runs, and only what says itself that it has this
name there.
"""

import importlib
import inspect
import re
import sys
from types import FunctionType
from typing import Any

from daskdl.data.rehearsal import MISFITS
from daskdl.errors import OptionError, SaveError
from daskdl.saving.trust import NOTHING, Trust

_FORM = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
LONGEST = 500  # characters

# What a module that is imported, or a class that is called, raises at most.
FAILURES = (*MISFITS, ImportError, NameError, OSError, SyntaxError)


def reference_to(value: Any) -> str:
    """Where a class or a function is imported from.

    Raises:
        OptionError: If importing it would not give this very one.

    Example:
        >>> import torch
        >>> reference_to(torch.nn.functional.mse_loss)
        'torch.nn.functional:mse_loss'
    """
    if not isinstance(value, type | FunctionType):
        kind = type(value)
        raise OptionError(
            f"a {kind.__module__}.{kind.__qualname__} is no class or function"
        )
    name = f"{value.__module__}:{value.__qualname__}"
    try:
        found = referred(name)
    except SaveError as error:
        raise OptionError(str(error)) from error
    if found is not value:
        raise OptionError(f"{name} is something else by now")
    return name


def referred(name: str, trust: Trust = NOTHING) -> Any:
    """The class or function that a name stands for.

    Args:
        name: As `reference_to` returns it, or anything else.
        trust: What may be imported for it.

    Raises:
        SaveError: If there is none, or none that may be named.
        OptionError: If its module is not imported here, and not trusted.

    Example:
        >>> referred("os:system")
        Traceback (most recent call last):
        daskdl.errors.SaveError: os:system is of the standard library, which a save \
does not name
    """
    if len(name) > LONGEST or not _FORM.fullmatch(name):
        raise SaveError(f"{name!r:.80} cannot be imported by that name")
    module, _, path = name.partition(":")
    top = module.partition(".")[0]
    if top == "__main__":
        raise SaveError(
            f"{name} is of the script or notebook that runs, which another one cannot "
            "import"
        )
    if top in sys.stdlib_module_names:
        raise SaveError(
            f"{name} is of the standard library, which a save does not name"
        )
    if module not in sys.modules and not trust.covers(module):
        raise OptionError(
            f"{name} is of a module that is not imported here; import it before, or "
            f"pass trusted=[{top!r}]"
        )
    found = _looked_up(module, path, name)
    named = getattr(found, "__module__", None), getattr(found, "__qualname__", None)
    if not isinstance(found, type | FunctionType) or named != (module, path):
        raise SaveError(f"{name} is no class or function of that module")
    return found


def _looked_up(module: str, path: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
        for step in path.split("."):
            found = inspect.getattr_static(found, step)
    except FAILURES as error:
        raise SaveError(
            f"{name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return found
