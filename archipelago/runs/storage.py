"""Where results go: a folder, a network folder, or an object-store address that pyarrow or fsspec can open.

A run directory needs what only a folder has (locks, appending, renaming), so a run under an address is written in a
working copy on its own node. The address gets whole files: after every checkpoint and at the end, first the tables,
then the checkpoint that stands on them, then what is gone is removed. Whoever writes there holds its lease
(`archipelago/runs/lease.py`); readers need none.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import posixpath
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipelago.core.errors import UserError
from archipelago.core.files import write_whole
from archipelago.core.own_files import CHECKPOINT, is_own_file, remove_own_files
from archipelago.core.redaction import has_keys, redacted

if TYPE_CHECKING:
    from archipelago.runs.lease import Lease

LEASE = ".lease.json"  # of what is written at an address: no file of the run
_UNFINISHED = re.compile(r"\.lock$|\.tmp-\d+|\.old-\d+|\.creating-\d+|\.removed-\d+")


def is_address(storage: str | Path) -> bool:
    """Whether this names an object store rather than a folder."""
    return "://" in str(storage)


def join(storage: str, *names: str) -> str:
    """The address or path of something inside `storage`; options of an address stay behind it.

    >>> join("s3://bucket/results/?region=here", "run", "report")
    's3://bucket/results/run/report?region=here'
    """
    if is_address(storage):
        path, mark, options = storage.partition("?")
        return "/".join([path.rstrip("/"), *names]) + mark + options
    return str(Path(storage).expanduser().joinpath(*names))


def name_of(address: str | Path) -> str:
    """The last part of an address or path.

    >>> name_of("s3://bucket/results/run?region=here"), name_of("runs/run/")
    ('run', 'run')
    """
    path = str(address).partition("?")[0] if is_address(address) else str(address)
    return path.rstrip("/").rpartition("/")[2]


def sibling(address: str, name: str) -> str:
    """The address or path of something beside it.

    >>> sibling("s3://bucket/results/run?region=here", "other")
    's3://bucket/results/other?region=here'
    """
    if is_address(address):
        path, mark, options = address.partition("?")
        return f"{path.rstrip('/').rpartition('/')[0]}/{name}{mark}{options}"
    return str(Path(address).with_name(name))


def filesystem(address: str) -> tuple[Any, str]:
    """(pyarrow's file system, the path inside it) of an address."""
    from pyarrow import fs

    refuse_bad_address(address)
    try:
        try:
            return fs.FileSystem.from_uri(address)
        except ValueError:  # not one of pyarrow's own kinds
            import fsspec

            other, path = fsspec.core.url_to_fs(address)
            return fs.PyFileSystem(fs.FSSpecHandler(other)), path
    except (ValueError, ImportError, OSError) as error:
        raise UserError(
            f"Expected storage to be a folder or an address that pyarrow or fsspec can open, got '{address}': "
            f"{' '.join(str(error).split())}.",
            code="wrong-address", address=address,
        ) from error  # fmt: skip


def refuse_bad_address(address: str) -> None:
    """A `UserError` about an address that names nothing, or that has keys in it: they would be written everywhere."""
    if has_keys(address):
        raise UserError(
            f"Expected an address without keys in it, got '{redacted(address)}': set them in the environment "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3) or in the file of credentials that its client "
            "reads, and leave them out of the address.",
            code="keys-in-address",
        )
    if not address.partition("://")[2].partition("?")[0].strip("/"):
        raise UserError(
            f"Expected an address as in s3://bucket/results, got '{address}', which names no bucket or folder.",
            code="no-bucket",
        )


def check_address(address: str) -> None:
    """Refuse an object store that cannot be written to, by writing to it."""
    filesystem(address)
    probe = join(address, f".archipelago-probe-{os.getpid()}")
    try:
        write_text(probe, "")
        system, path = filesystem(probe)
        system.delete_file(path)
    except OSError as error:
        raise UserError(
            f"Expected storage that can be written, got '{address}': {' '.join(str(error).split())}.",
            code="unwritable", path=address,
        ) from error  # fmt: skip


def write_text(address: str, text: str) -> None:
    """Put a whole file there."""
    if not is_address(address):
        Path(address).parent.mkdir(parents=True, exist_ok=True)
        write_whole(Path(address), text, durable=False)
        return
    system, path = filesystem(address)
    make_parent(system, path)
    with system.open_output_stream(path) as file:
        file.write(text.encode())


def read_text(address: str) -> str | None:
    """The text that is there; None if nothing is."""
    if not is_address(address):
        path = Path(address)
        try:
            return path.read_text(encoding="utf-8") if path.is_file() else None
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read ({error}): restore it.", code="unreadable", path=path
            ) from error
    system, inside = filesystem(address)
    try:
        with system.open_input_file(inside) as file:
            return bytes(file.read()).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(address, error) from error


def _unreadable(address: str, error: Exception) -> UserError:
    return UserError(
        f"'{address}' cannot be read: {' '.join(str(error).split())}.", code="unreadable", path=address
    )


def remove_file(address: str) -> None:
    """Remove a file that may be there."""
    if not is_address(address):
        Path(address).unlink(missing_ok=True)
        return
    system, path = filesystem(address)
    with contextlib.suppress(FileNotFoundError):
        system.delete_file(path)


def make_parent(system: Any, path: str) -> None:
    """Make the folder that a file of a store lies in, where stores have folders."""
    if system.type_name not in ("s3", "gcs", "abfs"):  # there, folders are only parts of names
        system.create_dir(posixpath.dirname(path), recursive=True)


class Mirror:
    """Keeps an address equal to a folder, whenever it is asked to, for as long as this process holds the `lease`."""

    def __init__(self, folder: Path, address: str, lease: Lease | None = None) -> None:
        self.folder, self.address, self.lease = folder, address, lease
        self._sent: dict[str, tuple[int, int]] = {}
        self._checkpoints: list[str] = []

    def fetch(self) -> bool:
        """Make the folder, which is not there yet, from the address; False if nothing is at the address."""
        system, root = filesystem(self.address)
        from pyarrow import fs

        try:
            found = system.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
        except OSError as error:
            raise _unreadable(self.address, error) from error
        for info in found:
            if info.type != fs.FileType.File:
                continue
            name = posixpath.relpath(info.path.lstrip("/"), root.strip("/"))
            if posixpath.basename(name) == LEASE or name.startswith("../"):  # a key may be any text
                continue
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with system.open_input_stream(info.path) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            self._sent[name] = _stamp(target)
        if "status.json" in self._sent:  # a run: an object store keeps no empty folders
            for name in ("checkpoints", "models", "records"):
                (self.folder / name).mkdir(exist_ok=True)
            for checkpoint in (self.folder / "checkpoints").iterdir():
                # The manifest is sent last: whoever sent the rest was killed.
                if CHECKPOINT.fullmatch(checkpoint.name) and not (checkpoint / "manifest.json").is_file():
                    remove_own_files(self.folder, f"checkpoints/{checkpoint.name}")
        return bool(self._sent)

    def follow(self) -> None:
        """Send what is new if there is a checkpoint that was not sent yet; raises `LeaseLost` in any case."""
        if self.lease is not None:
            self.lease.check()
        folder = self.folder / "checkpoints"
        present = (
            sorted(p.name for p in folder.iterdir() if not _UNFINISHED.search(p.name))
            if folder.is_dir()
            else []
        )
        if present != self._checkpoints:
            self.push()
            self._checkpoints = present

    def push(self) -> None:
        """Send what is new or changed, then remove what is gone.

        A run is one when its status is there, and a checkpoint when its manifest is: whatever a kill cuts off has
        neither, or stands on files that were sent before.
        """
        if self.lease is not None:
            self.lease.renew()
        system, root = filesystem(self.address)
        here = {}
        # os.walk passes over a folder that is gone; rglob raises.
        for folder, _, files in os.walk(self.folder):
            for path in (Path(folder) / file for file in files):
                name = path.relative_to(self.folder).as_posix()
                with contextlib.suppress(FileNotFoundError):  # an old checkpoint, removed in this moment
                    if not _UNFINISHED.search(name):
                        here[name] = _stamp(path)
        for name in sorted(
            here,
            key=lambda name: (
                name.startswith("checkpoints/"),
                name.endswith("manifest.json"),
                name == "status.json",
            ),
        ):
            if self._sent.get(name) == here[name]:
                continue
            self._hold()
            target = posixpath.join(root, name)
            make_parent(system, target)
            with contextlib.suppress(FileNotFoundError), (self.folder / name).open("rb") as source:
                with system.open_output_stream(target) as sink:
                    shutil.copyfileobj(source, sink)
                self._sent[name] = here[name]
        for name in [name for name in self._sent if name not in here]:
            if is_own_file(name):
                self._hold()
                with contextlib.suppress(FileNotFoundError):
                    system.delete_file(posixpath.join(root, name))
            del self._sent[name]

    def _hold(self) -> None:
        if self.lease is not None:
            self.lease.hold()


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def private_folder() -> Path:
    """The folder of this user for working copies; a `UserError` where somebody else could read or change them."""
    folder = Path(tempfile.gettempdir()) / f"archipelago-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a link or a file"
        raise UserError(
            f"Expected {folder}, for copies of what is in an object store, to be a folder of user {os.getuid()}, got "
            f"{kind} of user {found.st_uid}: remove it, or set TMPDIR to another folder.",
            code="untrusted", path=folder,
        )  # fmt: skip
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)
    return folder


def working_copy(address: str) -> Path:
    """The folder on this node in which a run of that address is written; its lock is beside it."""
    digest = hashlib.blake2b(address.encode(), digest_size=6).hexdigest()
    name = name_of(address)
    return private_folder() / f"{name}-{digest}" / name


@contextlib.contextmanager
def writable(address: str, wait: float = 0.0) -> Iterator[tuple[Path, Mirror | None]]:
    """(folder, mirror) to write a run in; for a folder, itself and no mirror.

    An address is fetched before and sent afterwards, whatever happens in between, and the working copy removed. Before
    anything else this process takes the lock of the working copy and the lease at the address; who still has them is
    given `wait` seconds to end.
    """
    if not is_address(address):
        yield Path(address).expanduser(), None
        return
    from archipelago.runs.lease import Lease
    from archipelago.runs.lock import FolderLock

    filesystem(address)  # a refused one leaves no folder here
    folder = working_copy(address)
    folder.parent.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.callback(FolderLock(folder.parent, address, max(wait, 0.5)).release)
        lease = Lease(address, wait)
        stack.callback(lease.release)
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        mirror = Mirror(folder, address, lease)
        mirror.fetch()
        try:
            yield folder, mirror
        finally:
            if folder.is_dir():
                mirror.push()


@contextlib.contextmanager
def scratch(address: str | Path) -> Iterator[Path]:
    """A path for a folder of this process alone, called like what is at `address`; removed afterwards."""
    with tempfile.TemporaryDirectory(
        prefix="copy-", dir=private_folder(), ignore_cleanup_errors=True
    ) as place:
        yield Path(place) / name_of(address)


def local_copy(address: str | Path) -> Path:
    """A folder with what is at `address`, to be read until this process ends; a folder is its own copy."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(reading(address))


@contextlib.contextmanager
def reading(address: str | Path) -> Iterator[Path]:
    """`local_copy` for a while: what was copied is removed afterwards."""
    if not is_address(address):
        yield Path(address).expanduser()
        return
    filesystem(str(address))  # a refused one leaves no folder here
    with scratch(address) as folder:  # called like the original: titles of reports are names of folders
        if not Mirror(folder, str(address)).fetch():
            sentence = f"There is nothing at '{address}': expected a run or a sweep."
            raise UserError(sentence, code="not-found", path=address)
        yield folder
