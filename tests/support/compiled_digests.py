"""`python -m tests.support.compiled_digests`: writes compiled_digests.json again, after a change of the kernels."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.compiled import DIGEST_JOBS, digest

if __name__ == "__main__":
    found = {name: digest(name) for name in DIGEST_JOBS}
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
