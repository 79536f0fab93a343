"""File systems in memory that do not rename a file onto another one."""

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Refusing(MemoryFileSystem):
    """Raises then."""

    protocol = "refusing"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix(f"{cls.protocol}://"))

    def mv(self, path1, path2, **kwargs):
        if self.exists(path2):
            raise FileExistsError(path2)
        super().mv(path1, path2, **kwargs)


class Silent(Refusing):
    """Does nothing then, as WebHDFS does."""

    protocol = "silent"

    def mv(self, path1, path2, **kwargs):
        if not self.exists(path2):
            super().mv(path1, path2, **kwargs)


for kind in (Refusing, Silent):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)
