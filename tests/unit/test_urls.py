"""Folders and names in URLs and paths; no file system is asked."""

import pytest

from daskdl.data.storage import (
    common_folder,
    is_local,
    is_pattern,
    is_url,
    joined,
    parted,
    parted_pattern,
)
from daskdl.errors import OptionError

FILES = {
    "/a/b.npy": ("/a", "b.npy"),
    "/b.npy": ("/", "b.npy"),
    "file:///b.npy": ("file:///", "b.npy"),
    "memory://b.npy": ("memory://", "b.npy"),
    "memory:///b.npy": ("memory:///", "b.npy"),
    "s3://bucket/b.npy": ("s3://bucket", "b.npy"),
    "simplecache::s3://bucket/a/b.npy": ("simplecache::s3://bucket/a", "b.npy"),
    "zip://a/b.npy::s3://bucket/x.zip": ("zip://a::s3://bucket/x.zip", "b.npy"),
    "zip://b.npy::memory://x.zip": ("zip://::memory://x.zip", "b.npy"),
}


@pytest.mark.parametrize("url", FILES)
def test_a_url_has_a_folder_and_a_name(url):
    assert parted(url) == FILES[url]


@pytest.mark.parametrize("url", FILES)
def test_a_folder_and_a_name_are_a_url(url):
    assert joined(*FILES[url]) == url


@pytest.mark.parametrize("folder", ["/a/", "memory://a//", "zip://a/::memory://x.zip"])
def test_slashes_at_the_end_of_a_folder_are_not_doubled(folder):
    assert joined(folder, "b") == joined(folder.replace("a//", "a/"), "b")
    assert "//b" not in joined(folder, "b")


@pytest.mark.parametrize(
    ("url", "folder", "pattern"),
    [
        ("/a/*.npy", "/a", "*.npy"),
        ("/*.npy", "/", "*.npy"),
        ("memory://*.npy", "memory://", "*.npy"),
        ("memory://a*/b.npy", "memory://", "a*/b.npy"),
        ("s3://bucket/a/[bc]/*.npy", "s3://bucket/a", "[bc]/*.npy"),
        ("zip://*.npy::memory://x.zip", "zip://::memory://x.zip", "*.npy"),
    ],
)
def test_a_pattern_is_seen_from_the_last_folder_without_one(url, folder, pattern):
    assert is_pattern(url)
    assert parted_pattern(url) == (folder, pattern)


@pytest.mark.parametrize(
    ("folders", "common"),
    [
        (["/a/b", "/a/bc"], "/a"),
        (["/a", "/b"], "/"),
        (["/", "/b"], "/"),
        (["memory://", "memory://a"], "memory://"),
        (["memory://a", "memory://b"], "memory://"),
        (["file:///a", "file:///b"], "file:///"),
        (["file:///a/b", "/a/c"], "/a"),
        (["s3://bucket/a", "s3://bucket/b"], "s3://bucket"),
        (["zip://a::/x.zip", "zip://b::/x.zip"], "zip://::/x.zip"),
    ],
)
def test_the_deepest_folder_that_has_all_is_found(folders, common):
    assert common_folder(folders) == common


@pytest.mark.parametrize(
    "folders", [["/a", "memory://a"], ["zip://a::/x.zip", "zip://a::/y.zip"]]
)
def test_folders_on_two_file_systems_are_refused(folders):
    with pytest.raises(OptionError, match="paths must be on one file system, got"):
        common_folder(folders)


def test_urls_are_told_from_paths():
    assert [is_url(v) for v in ("s3://b", "simplecache::s3://b", "/x", 3)] == [
        True,
        True,
        False,
        False,
    ]
    assert [is_local(v) for v in ("local:///x", "/x", "simplecache::s3://b")] == [
        True,
        True,
        False,
    ]
