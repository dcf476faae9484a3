"""Files that are written only if nobody else wrote them: on disks, on S3, and on stores that know no conditions."""

from __future__ import annotations

import datetime
import uuid
from pathlib import Path

import pytest

from archipelago.runs import conditional, lease
from archipelago.runs.conditional import Keys, create_text, credentials, replace_text, signed, version_of
from archipelago.runs.lease import Lease
from archipelago.runs.storage import read_text, remove_file, write_text
from tests.support.errors import refused
from tests.support.leases import holder, put_lease, taken_by_one_of_six
from tests.support.s3 import s3_server


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "signature"),
    [
        (
            "GET", "test.txt", {"range": "bytes=0-9"}, b"",
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        (
            "PUT", "test%24file.text",
            {"date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"},
            b"Welcome to Amazon S3.",
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
    ],
)  # fmt: skip
def test_signed_is_what_amazon_s_documentation_works_out(
    method: str, path: str, headers: dict[str, str], body: bytes, signature: str
) -> None:
    """The examples of "Signature calculations for the Authorization header" in the reference of S3."""
    keys = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    now = datetime.datetime(2013, 5, 24, tzinfo=datetime.UTC)
    url = f"https://examplebucket.s3.amazonaws.com/{path}"
    given = signed(method, url, headers, body, keys, "us-east-1", now)
    assert given["authorization"].endswith(f",Signature={signature}")


def test_signed_includes_the_token_of_temporary_keys() -> None:
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    given = signed("PUT", "https://b.x/k", {}, b"", Keys("a", "b", "c"), "us-east-1", now)
    assert given["x-amz-security-token"] == "c" and "x-amz-security-token" in given["authorization"]


def test_credentials_come_from_the_environment_or_the_file(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    environment = {"AWS_SHARED_CREDENTIALS_FILE": str(file)}
    assert credentials(environment) is None
    file.write_text(
        "[default]\naws_access_key_id = k\naws_secret_access_key = s%s\n"
        "[other]\naws_access_key_id = k2\naws_secret_access_key = s2\naws_session_token = t2\n[none]\n"
    )
    assert credentials(environment) == Keys("k", "s%s")
    assert credentials({**environment, "AWS_PROFILE": "other"}) == Keys("k2", "s2", "t2")
    assert credentials({**environment, "AWS_PROFILE": "none"}) is None
    given = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_SESSION_TOKEN": "c"}
    assert credentials({**environment, **given}) == Keys("a", "b", "c")
    file.write_bytes(b"\xff[")
    assert credentials(environment) is None


def test_create_and_replace_on_s3_hold_their_conditions() -> None:
    with s3_server() as (storage, _):
        address = f"{storage}/a+run/x=1.json"
        assert version_of(address) == "" and create_text(address, "one") is True
        assert create_text(address, "two") is False and read_text(address) == "one"
        seen = version_of(address)
        assert replace_text(address, "two", seen) is True
        assert replace_text(address, "three", seen) is False and read_text(address) == "two"
        remove_file(address)
        assert replace_text(address, "four", seen) is False and read_text(address) is None


def test_create_and_replace_cannot_say_where_they_cannot_ask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert replace_text((tmp_path / "x").as_uri(), "x", "v") is None and version_of(str(tmp_path)) == ""
    with s3_server() as (storage, _):
        address = f"{storage}/x.json"
        monkeypatch.setattr(conditional, "credentials", lambda environment: None)  # a machine's own role
        assert create_text(address, "x") is None
        monkeypatch.undo()
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        assert replace_text(f"{storage}/x.json", "x", "v") is None


@pytest.mark.parametrize("before", ["nobody", "one that expired"])
@pytest.mark.parametrize("store", ["s3", "s3 without conditions"])
def test_lease_on_s3_is_won_by_one_of_many(monkeypatch: pytest.MonkeyPatch, store: str, before: str) -> None:
    """With conditions nobody has to wait and see, not even where one has expired."""
    monkeypatch.setattr(lease, "SETTLE", 0.0 if store == "s3" else 1.0)
    monkeypatch.setattr(lease, "RENEWAL", 0.5)
    with s3_server(conditions=store == "s3") as (storage, _):
        address = f"{storage}/{uuid.uuid4().hex}"
        if before != "nobody":
            put_lease(address, seconds=-1)
        won = taken_by_one_of_six(address)
        won.renew()
        won.release()
        assert holder(address) == ""


def test_lease_on_s3_that_is_taken_in_the_moment_of_its_renewal_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its holder was stopped between its look and its write: what it writes must not replace another's."""
    monkeypatch.setattr(lease, "SETTLE", 0.0)
    monkeypatch.setattr(lease, "RENEWAL", 0.5)
    with s3_server() as (storage, _):
        address = f"{storage}/run"
        held = Lease(address)
        monkeypatch.setattr(lease, "RENEWAL", 60.0)  # nobody renews but this test

        def taken_meanwhile(text: str) -> None:
            monkeypatch.undo()
            put_lease(address, seconds=60)

        monkeypatch.setattr(lease, "replace_text", lambda at, text, version: (
            taken_meanwhile(text), replace_text(at, text, version)
        )[1])  # fmt: skip
        with pytest.raises(lease.LeaseLost, match="process 7 on other"):
            held.renew()
        assert holder(address) == "theirs"
        held.release()
        assert holder(address) == "theirs"


def test_lease_that_a_store_always_refuses_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lease, "create_text", lambda address, text: False)
    with refused("unwritable", says=".lease.json"):
        Lease(tmp_path.as_uri())
    write_text((tmp_path / "x").as_uri(), "x")  # the store is fine
