"""Files that come with the package, in a checkout and where it is installed."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]

# A folder of the top level in a checkout, and inside the package where a wheel was installed (pyproject.toml).
TUNE_CONFIGS = next(
    folder for folder in (_PACKAGE / "tune_configs", _PACKAGE.parent / "tune_configs") if folder.is_dir()
)


def first_comment(name: str) -> str:
    """The sentence that a file of `tune_configs/` begins with."""
    lines = (TUNE_CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ") for line in lines if line.startswith("#")), "")
