"""Link the landing page to the repository, once mkdocs.yml has its address.

With `repo_url` in mkdocs.yml, the reference `[repository][]` of a page becomes a link,
and the theme adds a link to the header of each page. Without, it becomes plain text.
"""

from typing import Any

REFERENCE = "[repository][]"


def on_page_markdown(markdown: str, *, config: Any, **kwargs: Any) -> str:
    """Resolve the reference of a page."""
    url = config["repo_url"]
    return markdown.replace(REFERENCE, f"[repository]({url})" if url else "repository")
