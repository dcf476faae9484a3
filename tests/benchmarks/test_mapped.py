from __future__ import annotations

import pytest

from benchmarks import mapped


@pytest.mark.slow
@pytest.mark.full
def test_small_set_is_decoded_and_trained_on_in_limited_memory() -> None:
    result = mapped.run(rounds=1, miniature=True)
    assert result["data_bytes"] == 400 * 3 * 84 * 84
    assert 0 < result["peak_own_bytes"] < mapped.LIMIT
    assert "0.01 GB mapped" in mapped.report(result)


def test_limit_is_one() -> None:
    """What the benchmark promises would fail if the process kept the samples in memory of its own."""
    import subprocess
    import sys

    code = (
        "import resource, numpy as np\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (300_000_000, 300_000_000))\n"
        "np.ones(400_000_000, np.uint8)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "MemoryError" in done.stderr
