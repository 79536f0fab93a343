"""Which loader is for files that have none given: their extension says it."""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from daskdl.data.formats.classes import listed
from daskdl.data.formats.csv import Csv
from daskdl.data.formats.loaders import Loader
from daskdl.data.formats.npy import Npy
from daskdl.data.formats.npz import Npz
from daskdl.data.formats.parquet import Parquet
from daskdl.data.formats.safetensors import Safetensors
from daskdl.errors import DataError

_BY_SUFFIX: Mapping[str, Loader] = {
    ".npy": Npy(),
    ".npz": Npz(),
    ".csv": Csv(),
    ".parquet": Parquet(),
    ".safetensors": Safetensors(),
}


def loader_for(names: Iterable[str], url: str) -> Loader:
    """Choose a loader by the extension that all files share.

    Args:
        names: Of the files.
        url: Of one of them, for the message.

    Raises:
        DataError: If there is none, or they have several.

    Example:
        >>> loader_for(["a/b.npy", "c.NPY"], "a/b.npy")
        Npy(label_column=None)
    """
    suffixes = sorted({PurePosixPath(name).suffix.lower() for name in names})
    if len(suffixes) == 1 and suffixes[0] in _BY_SUFFIX:
        return _BY_SUFFIX[suffixes[0]]
    raise DataError(
        f"files without a loader must all be of one of {listed(_BY_SUFFIX)}, got "
        f"{listed(suffixes)}, as {url}; give a loader=, or a pattern="
    )
