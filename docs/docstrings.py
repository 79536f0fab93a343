"""Show docstrings as they are meant: their examples, references and functions.

The parser for Google style expects `Examples:`, where the docstrings have `Example:`,
and does not know references such as ``:meth:`~daskdl.Trainer.fit```. It also takes
`daskdl.data.files` for the module of that name, where users call the function.
"""

import re
from typing import Any

import griffe

REFERENCE = re.compile(r":(?:class|data|func|meth|mod):`~?([\w.]+)`")


class Docstrings(griffe.Extension):
    """Rewrite docstrings before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
            obj.docstring.value = REFERENCE.sub(r"`\1`", value)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called once all modules of the package are loaded."""
        for module in pkg.modules.values():
            for name, inner in module.modules.items():
                own = inner.members.get(name)
                if isinstance(own, griffe.Function) and name in (module.exports or []):
                    module.set_member(name, own)
