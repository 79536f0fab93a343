"""Manifests whose checksum is right, whatever they say."""

import copy
import functools
import hashlib
import json
import operator

from daskdl.errors import DataError

WRONG = (None, -1, 0, 2**40, "x", [], {})


def sealed(manifest):
    """JSON of a manifest with the checksum of its content."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}).encode()


def variants(content, keys=None):
    """Yield each change of one value of JSON, described, and the changed JSON.

    Values are replaced by those of `WRONG`, numbers also by one more, and keys of dicts
    are deleted.
    `keys` are those of the outermost dict whose values change; None: all.
    """
    for place in paths_in(content):
        if not place or (keys is not None and place[0] not in keys):
            continue
        *outer, last = place
        for wrong in (*WRONG, "one more", "deleted"):
            changed = copy.deepcopy(content)
            parent = at(changed, outer)
            if wrong == "deleted" and isinstance(parent, dict):
                del parent[last]
            elif wrong == "one more" and type(parent[last]) is int:
                parent[last] += 1
            elif wrong in WRONG:
                parent[last] = wrong
            else:
                continue
            yield f"{place} {wrong!r}", changed


def at(value, path):
    """The value at a path."""
    return functools.reduce(operator.getitem, path, value)


def outcome(load):
    """The rows that a function loads, or the message of its DataError."""
    try:
        return load()
    except DataError as error:
        return str(error)


def paths_in(value, before=()):
    """Yield the path of each value in dicts, lists and tuples, the whole first."""
    yield before
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in items:
            yield from paths_in(child, (*before, key))
