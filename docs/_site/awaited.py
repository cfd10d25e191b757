"""Pages in ``extra.awaited`` of mkdocs.yml have a place in the navigation before they exist."""

from pathlib import Path
from typing import Any


def without(entries: list[Any], missing: set[str]) -> list[Any]:
    """The navigation without these pages."""
    kept: list[Any] = []
    for entry in entries:
        ((title, content),) = entry.items()
        if isinstance(content, list):
            kept.append({title: without(content, missing)})
        elif content not in missing:
            kept.append(entry)
    return kept


def on_config(config: Any) -> Any:
    """Called by mkdocs with its settings."""
    awaited = config.extra["awaited"]
    missing = {page for page in awaited if not (Path(config.docs_dir) / page).exists()}
    config.nav = without(config.nav, missing)
    return config
