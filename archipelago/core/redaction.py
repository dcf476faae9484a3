"""Keys in addresses: found, refused, and never written or printed."""

from __future__ import annotations

import re

_NAMES = (
    r"(?:access|secret|account|session|api|sas|private)?[-_]?"
    r"(?:key(?:[-_]?id)?|secret|token|password|passwd|sig|signature)"
)
_USER = re.compile(r"(?P<before>\w[\w+.-]*://)[^/?#\s'\"]*@")
_OPTION = re.compile(rf"(?P<before>[?&](?:[\w-]+[-_])?{_NAMES}=)[^&\s'\"]+", re.IGNORECASE)
HIDDEN = "***"


def has_keys(address: str) -> bool:
    """Whether an address says who may use what is there.

    >>> [has_keys(f"s3://{each}") for each in ("me:secret@bucket/x", "bucket/x?secret_key=7", "bucket/x?region=here")]
    [True, True, False]
    """
    return bool(_USER.search(address) or _OPTION.search(address))


def redacted(text: str) -> str:
    """A text without the keys in its addresses.

    >>> redacted("resume s3://me:secret@bucket/run?region=here&token=7")
    'resume s3://***@bucket/run?region=here&token=***'
    """
    return _OPTION.sub(rf"\g<before>{HIDDEN}", _USER.sub(rf"\g<before>{HIDDEN}@", text))
