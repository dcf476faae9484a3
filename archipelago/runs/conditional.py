"""Writing a file at an address only if nobody else wrote it: what a lease stands on.

Files are created by a hard link, and stores that fsspec opens by its `create`. pyarrow's client of S3 has no
conditional put, though S3 itself has had one since 2024: there the request is made and signed here, with the keys of
the environment or of the file of credentials. Stores that refuse conditions, keys that only a machine's metadata
service has, and Google's and Azure's stores through pyarrow are answered with None: nobody can say.
"""

from __future__ import annotations

import configparser
import datetime
import hashlib
import hmac
import os
import posixpath
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from archipelago.runs.storage import filesystem, is_address, make_parent

PATIENCE = 10.0  # seconds that an answer may take
_OCCUPIED = {409, 412}  # it is being written, or is another than the one that was read


class Keys(NamedTuple):
    """Who asks."""

    key: str
    secret: str
    token: str = ""


def create_text(address: str, text: str) -> bool | None:
    """Put a whole file there unless one is there already; whether that was done. None: this store cannot say."""
    if not is_address(address):
        return _create_file(Path(address), text)
    system, path = filesystem(address)
    if system.type_name == "local":
        return _create_file(Path(path), text)
    if system.type_name == "s3":
        return _put(address, system, path, text, {"if-none-match": "*"})
    other = getattr(getattr(system, "handler", None), "fs", None)  # fsspec's, behind pyarrow
    if other is None:
        return None
    make_parent(system, path)
    try:
        other.pipe_file(path, text.encode(), mode="create")
    except FileExistsError:
        return False
    except (TypeError, ValueError, NotImplementedError):  # one from before there were modes
        return None
    return True


def replace_text(address: str, text: str, version: str) -> bool | None:
    """Put a whole file in place of the one of that `version`; False if another is there, None: cannot say."""
    if not version or not is_address(address):
        return None
    system, path = filesystem(address)
    return _put(address, system, path, text, {"if-match": version}) if system.type_name == "s3" else None


def version_of(address: str) -> str:
    """What the store calls the content that is there now; "" where it has no name for it.

    To be asked before the content is read: if that is newer, `replace_text` refuses, which is the safe way round.
    """
    if not is_address(address):
        return ""
    system, path = filesystem(address)
    if system.type_name != "s3":
        return ""
    try:
        with system.open_input_stream(path) as file:
            found = file.metadata() or {}
    except OSError:
        return ""
    return bytes(found.get("ETag", found.get(b"ETag", b""))).decode()


def _create_file(path: Path, text: str) -> bool | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        begun.write_text(text)
        os.link(begun, path)
    except FileExistsError:
        return False
    except (
        OSError
    ):  # a file system without links, or one that cannot be written, which whoever writes next will say
        return None
    finally:
        begun.unlink(missing_ok=True)
    return True


# S3 ------------------------------------------------------------------------------------------------------------


def _put(address: str, system: Any, path: str, text: str, condition: Mapping[str, str]) -> bool | None:
    keys = credentials(os.environ)
    if keys is None:
        return None
    body = text.encode()
    url = object_url(address, path, system.region, os.environ)
    asked = {"content-type": "application/json", **condition}
    headers = signed("PUT", url, asked, body, keys, system.region, datetime.datetime.now(datetime.UTC))
    request = urllib.request.Request(url, data=body, headers=headers, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE):
            return True
    except urllib.error.HTTPError as error:
        gone = error.code == 404 and "if-match" in condition  # of a new file: there is no such bucket
        return False if gone or error.code in _OCCUPIED else None
    except OSError:  # out of reach, which the client that is asked next says better
        return None


def object_url(address: str, path: str, region: str, environment: Mapping[str, str]) -> str:
    """Where an object is, as pyarrow's client finds it: options of the address, the environment, Amazon.

    >>> object_url("s3://bucket/x", "bucket/x", "eu-west-1", {})
    'https://bucket.s3.eu-west-1.amazonaws.com/x'
    >>> object_url("s3://bucket/x?endpoint_override=127.0.0.1:9&scheme=http", "bucket/x y", "us-east-1", {})
    'http://127.0.0.1:9/bucket/x%20y'
    """
    options = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(address).query))
    endpoint = options.get("endpoint_override", "")
    if endpoint and "://" not in endpoint:
        endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
    endpoint = (
        endpoint or environment.get("AWS_ENDPOINT_URL_S3", "") or environment.get("AWS_ENDPOINT_URL", "")
    )
    quoted = urllib.parse.quote(path, safe="/-_.~")
    if endpoint:
        return f"{endpoint.rstrip('/')}/{quoted}"
    bucket, _, key = quoted.partition("/")
    return f"https://{bucket}.s3.{region}.amazonaws.com/{key}"


def credentials(environment: Mapping[str, str]) -> Keys | None:
    """The keys of the environment, or of the profile in the file of credentials; None where neither has any."""
    key, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if key and secret:
        return Keys(key, secret, environment.get("AWS_SESSION_TOKEN", ""))
    place = environment.get("AWS_SHARED_CREDENTIALS_FILE") or posixpath.join("~", ".aws", "credentials")
    file = configparser.ConfigParser(interpolation=None)
    try:
        file.read(Path(place).expanduser(), encoding="utf-8")
        found = file[environment.get("AWS_PROFILE") or "default"]
        return Keys(
            found["aws_access_key_id"], found["aws_secret_access_key"], found.get("aws_session_token", "")
        )
    except (KeyError, OSError, ValueError, configparser.Error):
        return None


def signed(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    keys: Keys,
    region: str,
    now: datetime.datetime,
) -> dict[str, str]:
    """The headers of a request without options, with Amazon's signature (version 4) over all of them."""
    parts = urllib.parse.urlsplit(url)
    time, digest = now.strftime("%Y%m%dT%H%M%SZ"), hashlib.sha256(body).hexdigest()
    every = {**headers, "host": parts.netloc, "x-amz-content-sha256": digest, "x-amz-date": time}
    if keys.token:
        every["x-amz-security-token"] = keys.token
    names = sorted(every)
    lines = [
        method,
        parts.path or "/",
        "",
        *(f"{name}:{every[name].strip()}" for name in names),
        "",
        ";".join(names),
    ]
    scope = "/".join([time[:8], region, "s3", "aws4_request"])
    asked = hashlib.sha256("\n".join([*lines, digest]).encode()).hexdigest()
    secret = f"AWS4{keys.secret}".encode()
    for part in scope.split("/"):
        secret = hmac.new(secret, part.encode(), hashlib.sha256).digest()
    text = "\n".join(["AWS4-HMAC-SHA256", time, scope, asked])
    signature = hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
    every["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.key}/{scope},SignedHeaders={';'.join(names)},Signature={signature}"
    )
    return every
