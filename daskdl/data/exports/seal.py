"""JSON with a checksum of itself, which says what it is and in which version.

A number that changed on a disk is found when it is read.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from daskdl.errors import DataError


class Seal(NamedTuple):
    """What the content of a file says about itself.

    Attributes:
        kind: What it is.
        version: Of its layout; raised by whoever changes that.
        maker: Who makes such a folder, for messages.
        remedy: What to do if it is damaged.
    """

    kind: str
    version: int
    maker: str
    remedy: str

    def closed(self, content: Mapping[str, Any]) -> bytes:
        """The bytes of a file with this content."""
        whole = {"kind": self.kind, "version": self.version, **content}
        whole["crc32"] = _checksum(whole)
        return json.dumps(whole, indent=1).encode()

    def opened(self, encoded: bytes, where: str) -> dict[str, Any]:
        """The content, if it is of this kind, undamaged, and not too new.

        Raises:
            DataError: If it is not; names where it was read.
        """
        try:
            content = json.loads(encoded)
        except ValueError as error:  # also of bytes that are not text
            raise DataError(f"{where} is damaged: {error}; {self.remedy}") from error
        if not isinstance(content, dict) or content.get("kind") != self.kind:
            raise DataError(f"{where} is not of {self.kind}; {self.maker}")
        version = content.get("version")
        if not isinstance(version, int) or version > self.version:
            raise DataError(
                f"{where} is of version {version}, but this daskdl reads up to "
                f"{self.version}; install a newer one"
            )
        if content.pop("crc32", None) != _checksum(content):
            raise DataError(f"{where} is damaged: its checksum is wrong; {self.remedy}")
        return content


def _checksum(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
