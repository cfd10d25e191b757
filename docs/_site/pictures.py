"""Pictures of the documentation lead to their files, so that a reader of a small screen can enlarge them."""

import re

LINK_OR_PICTURE = re.compile(r'<a\b[^>]*>.*?</a>|<img\b[^>]*\bsrc="([^"]+)"[^>]*>', re.DOTALL)


def linked(found: re.Match[str]) -> str:
    """A picture inside a link to its file; a link as it is."""
    return f'<a href="{found[1]}" title="Open the picture">{found[0]}</a>' if found[1] else found[0]


def on_page_content(content: str, **_: object) -> str:
    """Called by mkdocs with the HTML of each page."""
    return LINK_OR_PICTURE.sub(linked, content)
