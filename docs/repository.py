"""Link pages to the repository, once mkdocs.yml has its address.

With `repo_url` in mkdocs.yml, the reference `[repository][]` of a page becomes a link,
and the theme adds a link to the header of each page. Without, it becomes plain text.
"""

from typing import Any

REFERENCE = "[repository][]"
# Where the theme's script adds numbers of stars that it asks the host for.
COUNTED = 'data-md-component="source"'


def on_page_markdown(markdown: str, *, config: Any, **kwargs: Any) -> str:
    """Resolve the reference of a page."""
    url = config["repo_url"]
    return markdown.replace(REFERENCE, f"[repository]({url})" if url else "repository")


def on_post_page(output: str, **kwargs: Any) -> str:
    """Fetch nothing from the repository's host to read a page."""
    return output.replace(COUNTED, "")
