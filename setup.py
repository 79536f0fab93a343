"""Gives the page on PyPI the README, with links that lead to the repository.

Everything else is in pyproject.toml. On PyPI there are no files beside the README, so
its relative links become links to the files of this version.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
IMAGES = {".gif", ".jpg", ".png", ".svg"}
# The target of a link or an image in Markdown or HTML that names no scheme or anchor.
RELATIVE = re.compile(
    r'(?P<before>\]\(|\b(?:src|srcset|href)=")(?!\w+:|#)(?P<path>[^)"\s]+)'
)


def with_absolute_links(text: str, repository: str, version: str) -> str:
    """Return Markdown whose relative links lead to the tag of a version on GitHub."""

    def absolute(link: re.Match[str]) -> str:
        is_image = Path(link["path"]).suffix in IMAGES
        files = f"{repository.rstrip('/')}/{'raw' if is_image else 'blob'}/v{version}"
        return f"{link['before']}{files}/{link['path']}"

    return RELATIVE.sub(absolute, text)


def readme() -> str:
    """Return the README, with absolute links if pyproject.toml has the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "README.md").read_text()
    if (repository := project.get("urls", {}).get("Repository")) is None:
        return text  # `make release-check` tells that it is missing
    return with_absolute_links(text, repository, project["version"])


if __name__ == "__main__":
    setup(long_description=readme(), long_description_content_type="text/markdown")
