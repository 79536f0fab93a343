"""Original files packed as they are into a few large ones, on the cluster.

An object store answers a request after tens of milliseconds, whatever its size. A shard
of a hundred small images comes in one of them. What is in the files is not looked at.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from daskdl.config import check_count
from daskdl.data.passes import each_part
from daskdl.data.shards.archives import archived, check_archive, members_of
from daskdl.data.shards.index import INDEX, Index, Shard
from daskdl.data.shards.originals import Originals, found
from daskdl.data.source import Source
from daskdl.data.stores.listing import Path, is_path
from daskdl.data.stores.store import Store, store_of
from daskdl.errors import DataError, OptionError

logger = logging.getLogger(__name__)


def file_batches(
    paths: Path | Sequence[Path],
    url: Path,
    files_per_batch: int,
    *,
    root: Path | None = None,
    format: Literal["zip", "tar"] = "zip",
    seed: int | None = 0,
    client: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Index:
    """Pack original files into uncompressed shards, with their relative paths.

    Shards appear whole or not at all, and the index when all are there. Calling it
    again goes on with what is missing, and does nothing when nothing is; files that
    were changed meanwhile under the same name are not noticed. The same files and the
    same seed give the same bytes, however many workers there are. A worker holds the
    files of one shard in memory for each of its threads.

    Args:
        paths: A folder, a file, a glob, or a list of files and globs; local or at
            URLs of one kind.
        url: Folder for the shards and their index, ``index.json``.
        files_per_batch: Folder in a shard, >= 1; the last may have fewer.
        root: The paths that are kept are relative to this folder. None: the folder
            given; of a glob, the one in front of its first wildcard; of a list, the
            deepest that has all.
        format: "zip" or "tar".
        seed: Of the order of the files; None: as listed, which would make shards of
            images of one class each.
        client: Of Dask. None: the default client, else this process, as False says.
        storage_options: Of both file systems, for fsspec.

    Returns:
        What is in the shards.

    Raises:
        DataError: If there are no files, one cannot be read, or a shard not written.
        OptionError: If an argument is not as described, or other files are packed
            there.

    Example:
        >>> Store("memory://daskdl-notes").write("a/1.txt", b"one")
        >>> index = file_batches("memory://daskdl-notes", "memory://daskdl-packed", 64)
        >>> [member.name for shard in index.shards for member in shard.members]
        ['a/1.txt']
    """
    check_archive(format)
    check_count("files_per_batch", files_per_batch)
    options = dict(storage_options or {})
    target = Store(store_of(url).url, options)
    originals = Originals(found(paths, root, options), files_per_batch, format, seed)
    if is_path(paths):
        _check_apart(originals, target)
    done = _finished(originals, target)
    if done is not None:
        logger.info("%d files are in %s already", done.files, target.url)
        return done
    shards = dict(each_part(originals, partial(_pack, target), client))
    ordered = tuple(shards[part] for part in range(originals.parts))
    index = Index(format, originals.plan, ordered)
    index.write(target)
    logger.info(
        "packed %d files into %d shards at %s", index.files, len(ordered), target.url
    )
    return index


def _pack(target: Store, source: Source, part: int) -> Shard:
    """What is done with each group of files, on a worker."""
    assert isinstance(source, Originals)
    name = source.shard_name(part)
    there = _adopted(source, part, target)
    if there is not None:
        return there
    content = archived(source.contents(part), source.archive)
    target.write(name, content)
    members = members_of(content, source.archive, target.url_of(name))
    return Shard(name, len(content), members)


def _adopted(originals: Originals, part: int, target: Store) -> Shard | None:
    """The shard that was written before, if it is what it should be."""
    name = originals.shard_name(part)
    if not target.exists(name):
        return None
    content = target.read(name)
    try:
        members = members_of(content, originals.archive, target.url_of(name))
    except DataError:
        return None
    files = [(m.name, content[m.start : m.start + m.size]) for m in members]
    whole = archived(files, originals.archive) == content  # they are made always alike
    same = [member.name for member in members] == originals.members(part)
    return Shard(name, len(content), members) if whole and same else None


def _finished(originals: Originals, target: Store) -> Index | None:
    """The index, if everything was packed before."""
    if not target.exists(INDEX):
        return None
    index = Index.read(target)
    if index.plan != originals.plan:
        raise OptionError(
            f"{target.url} has shards of other files, or in another order; delete "
            "them, or choose another url"
        )
    return index


def _check_apart(originals: Originals, target: Store) -> None:
    root = originals.files.store
    if f"{target.place}/".startswith(f"{root.place}/"):
        raise OptionError(
            f"url must not be in the root of the files, {root.url}, got {target.url}; "
            "the shards would be packed the next time"
        )
