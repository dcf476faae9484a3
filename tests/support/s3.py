"""A stand-in for S3 on this machine: the part of its HTTP interface that pyarrow's client uses, kept in memory.

Path-style addresses, no signatures checked. Objects appear atomically, as in S3, which puts them under a condition if
asked (`If-None-Match: *`, `If-Match`); `conditions=False` is a store from before there were any, which ignores them.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

import pytest

_SPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]
    uploads: dict[str, dict[int, bytes]]
    numbers: Iterator[int]
    conditions: bool
    one_at_a_time: threading.Lock

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing is logged."""

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        return urllib.parse.unquote(parts.path).lstrip("/"), query

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            return self._chunks()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return _unsigned(body) if "aws-chunked" in self.headers.get("Content-Encoding", "") else body

    def _chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return _unsigned(found) if "aws-chunked" in self.headers.get("Content-Encoding", "") else found

    def _answer(self, code: int, body: bytes | str = b"", *, size: int | None = None, **headers: str) -> None:
        content = body.encode() if isinstance(body, str) else body
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content) if size is None else size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _missing(self) -> None:
        self._answer(404, "<Error><Code>NoSuchKey</Code><Message>not there</Message></Error>")

    def do_HEAD(self) -> None:
        key, _ = self._asked()
        if key in self.objects:
            self._answer(
                200, size=len(self.objects[key]), ETag=_tag(self.objects[key]),
                Last_Modified="Mon, 01 Jan 2024 00:00:00 GMT",
            )  # fmt: skip
        elif "/" not in key.rstrip("/"):
            self._answer(200)
        else:
            self._answer(404)

    def do_GET(self) -> None:
        key, query = self._asked()
        if "list-type" in query:
            self._answer(200, self._listing(key.rstrip("/"), query), Content_Type="application/xml")
        elif key not in self.objects:
            self._missing()
        else:
            body, wanted = self.objects[key], self.headers.get("Range")
            if wanted:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                part = body[int(first) : int(last) + 1 if last else None]
                whole = f"bytes {first}-{int(first) + len(part) - 1}/{len(body)}"
                self._answer(206, part, ETag=_tag(body), Content_Range=whole)
            else:
                self._answer(200, body, ETag=_tag(body))

    def _listing(self, bucket: str, query: dict[str, str]) -> str:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        keys = sorted(key.partition("/")[2] for key in self.objects if key.startswith(f"{bucket}/"))
        found, folders = [], set()
        for key in (key for key in keys if key.startswith(prefix)):
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if cut:
                folders.add(f"{prefix}{head}{cut}")
            else:
                found.append(key)
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[f'{bucket}/{key}'])}</Size>"
            "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in found
        )
        commons = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
        )
        count = len(found) + len(folders)
        return (
            f"<ListBucketResult {_SPACE}><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{count}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{items}{commons}</ListBucketResult>"
        )

    def do_PUT(self) -> None:
        key, query = self._asked()
        body = self._body()
        if "uploadId" in query:
            self.uploads[query["uploadId"]][int(query["partNumber"])] = body
            self._answer(200, ETag='"x"')
            return
        with self.one_at_a_time:
            refused = self._refused(key)
            if not refused:
                self.objects[key] = body
        self._answer(refused or 200, ETag=_tag(body))

    def _refused(self, key: str) -> int:
        """What a condition on the object that is there is answered with; 0 if it holds."""
        if not self.conditions:
            return 0
        wanted, there = self.headers.get("If-Match"), self.objects.get(key)
        if self.headers.get("If-None-Match") == "*" and there is not None:
            return 412
        if wanted and there is None:
            return 404
        return 412 if wanted and there is not None and wanted != _tag(there) else 0

    def do_POST(self) -> None:
        key, query = self._asked()
        self._body()
        if "uploads" in query:
            name = f"upload-{next(self.numbers)}"  # several clients send at the same time
            self.uploads[name] = {}
            inside = f"<UploadId>{name}</UploadId>"
            self._answer(
                200, f"<InitiateMultipartUploadResult {_SPACE}>{inside}</InitiateMultipartUploadResult>"
            )
        elif "delete" in query:
            self._answer(200, f"<DeleteResult {_SPACE}></DeleteResult>")
        else:
            parts = self.uploads.pop(query["uploadId"])
            self.objects[key] = b"".join(parts[number] for number in sorted(parts))
            inside = f"<Key>{escape(key)}</Key><ETag>x</ETag>"
            self._answer(
                200, f"<CompleteMultipartUploadResult {_SPACE}>{inside}</CompleteMultipartUploadResult>"
            )

    def do_DELETE(self) -> None:
        key, query = self._asked()
        self.objects.pop(key, None)
        self.uploads.pop(query.get("uploadId", ""), None)
        self._answer(204)


def _tag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


def _unsigned(body: bytes) -> bytes:
    """The content of a body in AWS's own chunks: a size in hex and extensions, a line each, then the bytes."""
    found = b""
    while body:
        line, _, rest = body.partition(b"\r\n")
        size = int(line.split(b";")[0] or b"0", 16)
        if not size:
            break
        found, body = found + rest[:size], rest[size + 2 :]
    return found


@contextmanager
def s3_server(*, conditions: bool = True) -> Iterator[tuple[str, dict[str, bytes]]]:
    """(address of a bucket, its objects by bucket/key); pyarrow finds the server through the environment."""
    objects: dict[str, bytes] = {}
    state = {"objects": objects, "uploads": {}, "numbers": itertools.count(), "conditions": conditions}
    kind = type("Handler", (_Handler,), {**state, "one_at_a_time": threading.Lock()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (
                ("AWS_ACCESS_KEY_ID", "test"),
                ("AWS_SECRET_ACCESS_KEY", "test"),
                ("AWS_DEFAULT_REGION", "us-east-1"),
                ("AWS_EC2_METADATA_DISABLED", "true"),
                ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}"),
            ):
                patch.setenv(name, value)
            yield "s3://bucket/results", objects
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
