"""How much memory this process may still take: of the machine, of its container, of its own limit."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes that can be taken before somebody says no."""
    import psutil

    found = [psutil.virtual_memory().available]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        found.append(limit - psutil.Process().memory_info().vms)
    with suppress(OSError, ValueError):  # "max" where there is none
        of_container = int((_CGROUP / "memory.max").read_text())
        found.append(of_container - int((_CGROUP / "memory.current").read_text()) + _cached())
    return max(min(found), 0)


def _cached() -> int:
    """Bytes of files that the kernel keeps as long as nobody needs the memory; a container counts them as taken."""
    lines = (line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    return sum(int(count) for name, count in lines if name in ("active_file", "inactive_file"))


def in_words(count: float) -> str:
    """
    >>> in_words(2_500_000_000), in_words(1e18), in_words(12_000)
    ('2.5 GB', '1,000,000,000 GB', '0.012 MB')
    """
    if count >= 1e12:
        return f"{count / 1e9:,.0f} GB"
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.2g} MB"
