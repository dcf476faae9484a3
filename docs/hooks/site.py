"""MkDocs hook: adds the pages that are made of the registry, and documents of the project's root.

mkdocs.yml names the pages that are written by hand; what is registered when the site is built has its page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from docs.hooks import entries, errors, pictures, published, small_runs  # noqa: E402

# Documents that the site shows beside its own pages: where they are, and what they become.
DOCUMENTS = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "DECISIONS.md": "project/decisions.md",
    "CHANGELOG.md": "project/changelog.md",
}
MARK = re.compile(r"<!-- generated: (\S+) -->")


def generated() -> dict[str, str]:
    """Path in the site -> Markdown, of all pages that no file of `docs/` has."""
    pages = {
        "methods/index.md": entries.methods_index(),
        "settings.md": entries.settings_page(),
        "errors.md": errors.errors_page(),
    }
    for kind in entries.KINDS:
        pages |= {
            f"methods/{entry.name}.md": entries.method_page(kind, entry) for entry in entries.entries(kind)
        }
    for source, page in DOCUMENTS.items():
        pages[page] = (ROOT / source).read_text(encoding="utf-8")
    for source in sorted((ROOT / "results").glob("*.md")):
        pages[f"results/{source.name}"] = source.read_text(encoding="utf-8")
    return pages


def parts() -> dict[str, str]:
    """What stands for a mark `<!-- generated: NAME -->` in a page that is written by hand."""
    return {
        "data-sets": entries.simple_table("data set", "pictures/sets", pictures.kept("sets")),
        "partitions": entries.simple_table("partition", "pictures/partitions", pictures.kept("partitions")),
        "models": entries.simple_table("model"),
        "extension-points": entries.extension_table(),
        "configs": published.config_table(),
        "published": published.published_table(),
    }


def on_config(config: Any) -> Any:
    """A page in the navigation for every method and add-on, and for every page of results.

    Figures of small runs that are missing are made here, before MkDocs looks which files there are.
    """
    for kind in entries.KINDS:
        for entry in entries.entries(kind):
            small_runs.found(kind, entry.name)
    methods = [{"All": "methods/index.md"}]
    for kind, title in zip(entries.KINDS, ("Bases", "Add-ons"), strict=True):
        found = [{entry.label: f"methods/{entry.name}.md"} for entry in entries.entries(kind)]
        methods.append({title: found})
    results = [
        {
            path.read_text(encoding="utf-8")
            .splitlines()[0]
            .lstrip("# ")
            .partition(":")[0]: f"results/{path.name}"
        }
        for path in sorted((ROOT / "results").glob("*.md"))
    ]
    for item in config.nav:
        if "Methods" in item:
            item["Methods"] = methods
        if "Results" in item:
            item["Results"] = [*item["Results"], *results]
    return config


def on_files(files: Any, config: Any) -> Any:
    """The generated pages, and the pictures and tables that pages of results show or link to."""
    from mkdocs.structure.files import File

    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    for path, text in generated_results().items():
        for name in re.findall(r"\]\(([^)#:]+)\)", text):
            source = path.parent / name
            if source.is_file() and not files.get_file_from_path(f"results/{name}"):
                files.append(File.generated(config, f"results/{name}", abs_src_path=str(source)))
    return files


def generated_results() -> dict[Path, str]:
    """The pages of results, as they stand in the project."""
    return {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "results").glob("*.md"))}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Marks become what they stand for."""
    if not MARK.search(markdown):
        return markdown
    known = parts()
    return MARK.sub(lambda found: known[found[1]], markdown)
