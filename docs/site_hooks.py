"""Hooks of mkdocs, which prepare the pages before they are rendered; mkdocs.yml names this file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s#]+)(#[^)]*)?\)")
COMMENT = re.compile(r"^<!--.*?-->\n", re.M | re.S)


def on_files(files: Files, config: Any) -> None:
    """Add README.md as the first page."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Drop comments, and name files that are no part of the site in place of linking to them."""
    is_start = page.file.src_uri == "index.md"
    folder = ROOT if is_start else (ROOT / "docs" / page.file.src_uri).parent

    def resolve(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = (folder / target).resolve()
        if path == ROOT / "README.md":
            return f"[{text}]({'../' * page.file.src_uri.count('/')}index.md{anchor or ''})"
        if not path.is_relative_to(ROOT / "docs") or path.suffix not in (".md", ".svg"):
            name = f"`{path.relative_to(ROOT)}`"
            return name if text.strip("`") in (target, path.name, name.strip("`")) else f"{text} ({name})"
        return f"{image}[{text}]({path.relative_to(ROOT / 'docs') if is_start else target}{anchor or ''})"

    return LINK.sub(resolve, COMMENT.sub("", markdown))
