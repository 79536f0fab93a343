"""Show the examples in docstrings as code.

The docstrings have a section `Example:`; the parser of Google style knows only
`Examples:`, and would read the doctests in the other one as quotations.
"""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Rename the sections before they are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
