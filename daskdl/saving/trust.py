"""Whose code the reader of a save vouches for."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from daskdl.errors import OptionError

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Trust:
    """Modules that may be imported, and called with arguments, because a save says so.

    Attributes:
        modules: Their names; of a package all modules that are in it.

    Example:
        >>> trust = Trust.of(["my_nets"])
        >>> trust.covers("my_nets.small"), trust.covers("my_nets_2")
        (True, False)
    """

    modules: frozenset[str] = frozenset()

    @classmethod
    def of(cls, names: Any) -> "Trust":
        """Trust modules by their names.

        Raises:
            OptionError: If it is anything but a list of such names.
        """
        several = isinstance(names, Iterable) and not isinstance(names, str | bytes)
        listed: list[Any] = list(names) if several else [None]
        if not all(isinstance(n, str) and _MODULE.fullmatch(n) for n in listed):
            raise OptionError(
                "trusted must be a list of names of modules, such as ['my_nets'], got "
                f"{names!r:.200}"
            )
        return cls(frozenset(listed))

    def covers(self, module: str) -> bool:
        """Whether it is one of the modules, or in one of them."""
        return any(f"{module}.".startswith(f"{one}.") for one in self.modules)


NOTHING = Trust()
