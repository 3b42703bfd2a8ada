"""The spool: files for failures that the database cannot be told of.

A process has one file at most, locked as long as it lives. A line is one failure, and on the disk when `write` returns;
whether the database came to know of it after all is asked there, so nothing is ever crossed out: when no line is needed
any more the file goes. What a dead process left is taken over by whoever comes next. Everything here may block, and
raises OSError.
"""

import errno
import fcntl
import json
import os
import stat
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Self

LIMIT = 64 << 20
OFF = "off"
_SUFFIX = ".jsonl"
_BATCH, _BATCH_BYTES = 50, 1 << 20
_TRIES = 10


def directory(chosen: str | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return where spools are: as chosen, else $BARTLEBY_SPOOL, else among the state of programs; None: nowhere."""
    chosen = chosen or environment.get("BARTLEBY_SPOOL")
    if chosen == OFF:
        return None
    try:
        if chosen:
            return Path(chosen).expanduser().absolute()
        state = environment.get("XDG_STATE_HOME")
        return (Path(state) if state else Path.home() / ".local" / "state") / "bartleby"
    except RuntimeError:  # there is no home
        return None


def obstacle(folder: Path) -> str | None:
    """Return why nothing can be written there, as far as that can be told without writing."""
    try:
        there = next(each for each in (folder, *folder.parents) if each.exists())
        if not there.is_dir():
            return f"{there} is no directory"
        return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"
    except OSError as error:
        return str(error)


class Spool:
    """The file of this process in a folder, made when it is needed."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        """All files of the folder together have at most `limit` bytes; what would be more is refused."""
        self.folder = folder
        self._limit = limit
        self._file: int | None = None
        self._path: Path | None = None
        _SPOOLS.add(self)

    @property
    def in_use(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    def write(self, lines: Iterable[str]) -> None:
        """Put these lines on the disk: all of them, or none and an error."""
        data = "".join(f"{line}\n" for line in lines).encode()
        if sum(_size(path) for path in self._files()) + len(data) > self._limit:
            raise OSError(errno.ENOSPC, f"the spool has reached its {self._limit >> 20} MiB", str(self.folder))
        file = self._opened()
        before = os.fstat(file).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, before)
            raise

    def clear(self) -> None:
        """Remove the file: no line of it is needed any more."""
        file, path = self._file, self._path
        if file is not None and path is not None:
            # emptied first: where nothing can be removed, at least nothing is entered again
            os.ftruncate(file, 0)
            path.unlink(missing_ok=True)
            self.close()

    def close(self) -> None:
        """Leave the file to whoever comes next."""
        file, self._file, self._path = self._file, None, None
        if file is not None:
            os.close(file)

    def left(self) -> list[Path]:
        """Return the files of others; most of these live, and have theirs locked."""
        return [path for path in self._files() if path != self._path]

    def _files(self) -> list[Path]:
        try:
            # whose folder it is, his files they are: a link to another one would have us tidy up there
            _refuse_unless_ours(os.lstat(self.folder), stat.S_ISDIR, self.folder)
            with os.scandir(self.folder) as found:
                return sorted(Path(each.path) for each in found if each.name.endswith(_SUFFIX) and each.is_file())
        except FileNotFoundError:
            return []

    def _opened(self) -> int:
        for _ in range(_TRIES):
            if self._file is not None:
                return self._file
            self._make_folder()
            path = self.folder / f"{uuid.uuid4().hex}{_SUFFIX}"
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                # somebody who looks for files that were left may have been quicker
                if _locked(file) and os.fstat(file).st_nlink:
                    _sync(self.folder)
                    self._file, self._path = file, path
            finally:
                if self._file is None:
                    os.close(file)
        if self._file is None:
            raise OSError(errno.EAGAIN, "the spool cannot be locked", str(self.folder))
        return self._file

    def _make_folder(self) -> None:
        missing = [each for each in (self.folder, *self.folder.parents) if not each.exists()]
        for each in reversed(missing):
            with suppress(FileExistsError):
                each.mkdir(mode=0o700)
            _sync(each.parent)


class Left:
    """A file that a dead process left, and that is ours now."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self._stream = stream
        self.unreadable = 0
        """Lines that are no entries. The last may be torn: it was never finished, and nobody relied on it."""

    @classmethod
    def take(cls, path: Path) -> Self | None:
        """Take a file over; None if its process lives, or another has taken it."""
        try:
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        stream = os.fdopen(file, "rb")
        with ExitStack() as unless_taken:
            unless_taken.callback(stream.close)
            _refuse_unless_ours(os.fstat(file), stat.S_ISREG, path)
            if not _locked(file) or not os.fstat(file).st_nlink:
                return None
            unless_taken.pop_all()
        return cls(path, stream)

    def batch(self) -> dict[str, str]:
        """Return the next lines by their ids; empty at the end."""
        entries: dict[str, str] = {}
        size = 0
        while len(entries) < _BATCH and size < _BATCH_BYTES and (line := self._stream.readline()).endswith(b"\n"):
            try:
                text = line.decode()
                entries[str(json.loads(text)["id"])] = text
                size += len(line)
            except (ValueError, TypeError, KeyError, RecursionError):
                self.unreadable += 1
        return entries

    def remove(self) -> None:
        """All of it was entered."""
        self.path.unlink(missing_ok=True)

    def put_aside(self) -> Path:
        """Keep it for a person to look at; return where."""
        return self.path.rename(self.path.with_suffix(".unusable"))

    def close(self) -> None:
        """Let go of it."""
        self._stream.close()


def _refuse_unless_ours(found: os.stat_result, is_kind: Callable[[int], bool], path: Path) -> None:
    if not is_kind(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "it belongs to somebody else", str(path))


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # its process needs it no more
        return 0


def _sync(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


_SPOOLS: "weakref.WeakSet[Spool]" = weakref.WeakSet()


def _let_go() -> None:
    # a child of a handler may outlive us, and the lock would live with it
    for spool in list(_SPOOLS):
        with suppress(OSError):
            spool.close()


os.register_at_fork(after_in_child=_let_go)
