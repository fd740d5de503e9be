"""Writes llms.txt into the built site: an index of the pages for language models (``hooks`` in mkdocs.yml)."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation

LONGEST = 240  # characters of the line about a page


def on_nav(nav: Navigation, /, *, config: MkDocsConfig, files: Files) -> Navigation:
    """Adds the file, with a line for each page in the order of the navigation: its title and what its sections are."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for page in nav.pages:
        lines.append(f"- [{page.title}]({page.url}): {sections_of(Path(page.file.abs_src_path).read_text())}")
    files.append(File.generated(config, "llms.txt", content="\n".join([*lines, ""])))
    return nav


def sections_of(page: str) -> str:
    """Returns the headings of the second level in the text of a page; without them, its first sentence."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^## (.+?)(?: \{.*\})?$", text, flags=re.MULTILINE)
    if not headings:
        first = text.split("\n\n")[1]
        headings = [" ".join(first.split()).partition(". ")[0].rstrip(".")]
    line = "; ".join(headings)
    return line if len(line) <= LONGEST else f"{line[:LONGEST].rpartition(';')[0]}; ..."
