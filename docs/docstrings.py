"""Show docstrings as they are meant: their examples, references and signatures.

The parser for Google style expects `Examples:`, where the docstrings have `Example:`.
References, such as ``:meth:`~daskdl.Trainer.fit```, public names in backticks, such as
`DataError`, and pages of the documentation become links. Classes that users do not
create, whose docstrings have no `Args:`, show no signature. The parser of Python takes
`daskdl.data.files` for the module of that name, where users call the function.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

REFERENCE = re.compile(
    r"(:(?:class|data|func|meth|mod):)?(?<!`)`(~?)([A-Za-z_][\w.]*)`(?!`)"
)
PAGE = re.compile(r"\b(the page\s+on\s+)(how it works|data|evaluation|saving)\b")
# Where the reference has the names of these packages.
PACKAGES = {
    "data": "../data/",
    "keras": "../models/#daskdlkeras",
    "metrics": "../evaluation/#daskdlmetrics",
    "sklearn": "../models/#daskdlsklearn",
}
DOCS = Path(__file__).parent


class Docstrings(griffe.Extension):
    """Rewrite docstrings before they are parsed."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called once all modules of the package are loaded."""
        objects = [*with_docstrings(pkg)]  # before functions replace modules
        for module in pkg.modules.values():
            for name, inner in module.modules.items():
                function = inner.members.get(name)
                exported = name in (module.exports or [])
                if exported and isinstance(function, griffe.Function):
                    module.set_member(name, function)
        self.public = {
            f"{package}.{name}".removeprefix("public."): pkg[package][str(name)]
            for package in ("public", *PACKAGES)
            for name in pkg[package].exports or []
        }
        self.names = {value.canonical_path: n for n, value in self.public.items()}
        for described in objects:
            text = described.docstring.value
            if described.is_class and not re.search(r"^Args:$", text, re.MULTILINE):
                described.members.pop("__init__", None)
            described.docstring.value = self.rewritten(text, described)

    def rewritten(self, text: str, described: griffe.Object) -> str:
        """A docstring with links."""

        def reference(match: re.Match[str]) -> str:
            role, short, name = match.groups()
            if not role and not name.startswith("daskdl.") and not name[0].isupper():
                return match[0]  # an argument, say
            code = f"`{name.rpartition('.')[2] if short else name}`"
            package = PACKAGES.get(name.removeprefix("daskdl."))
            if package and name.startswith("daskdl."):
                return f'<a href="{package}">{code}</a>'
            identifier = self.identifier(name, described)
            if identifier in (None, self.identifier(described.path, described)):
                return code
            return f"[{code}][{identifier}]"

        def page(match: re.Match[str]) -> str:
            name = match[2].replace(" ", "-")
            assert (DOCS / f"{name}.md").is_file(), name
            # Docstrings are shown on the pages in `api/`.
            return f'{match[1]}<a href="../../{name}/">{match[2]}</a>'

        text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
        return PAGE.sub(page, REFERENCE.sub(reference, text))

    def identifier(self, name: str, described: griffe.Object) -> str | None:
        """The anchor of a public name, or of a method of a public class.

        Args:
            name: The name, in full or as seen from the docstring.
            described: What the docstring is of.

        Returns:
            The anchor in the reference; None for all other names.
        """
        scopes = ["daskdl.", ".".join(described.path.split(".")[:2]) + ".", ""]
        while described is not None:
            if described.is_class:
                scopes.insert(0, f"{described.path}.")
            described = described.parent
        for path in (f"{scope}{name}" for scope in scopes):
            owner, _, method = path.rpartition(".")
            public = self.names.get(path, path.removeprefix("daskdl."))
            if public in self.public:
                return f"daskdl.{public}"
            public = self.names.get(owner, owner.removeprefix("daskdl."))
            if public in self.public and has_method(self.public[public], method):
                return f"daskdl.{public}.{method}"
        return None


def with_docstrings(scope: griffe.Object) -> Iterator[griffe.Object]:
    """Every object with a docstring in a module or class."""
    for member in scope.members.values():
        if not member.is_alias:
            if member.docstring is not None:
                yield member
            yield from with_docstrings(member)


def has_method(kind: griffe.Object | griffe.Alias, name: str) -> bool:
    """Whether a class has a public method with a docstring."""
    method = kind.all_members.get(name) if kind.is_class else None
    return bool(method and method.docstring) and not name.startswith("_")
