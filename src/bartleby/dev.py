"""The embedded PostgreSQL, for people who have none running.

A server is one folder and everything in it is ours:

    data/         the cluster, owned by the account that runs the server
    run/          its Unix socket, unless the path is too long for one
    binaries/     a copy of the programs, only where that account cannot reach the originals
    password      of the superuser, 0600
    port, log     the port of last time, so that the DSN stays the same; what the server said since it started
    lock          held while somebody starts the server

PostgreSQL refuses to run as root, so as root it runs as `postgres` or `nobody`: the folder stays root's, only
`data` and `run` are given to that account, and no permission outside of the folder is touched.
"""

import contextlib
import fcntl
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal, Self

from bartleby.binaries import Account, NoPostgres, account_for, find_binaries, runnable

__all__ = ["NoPostgres", "Server", "default_directory", "find_binaries", "running", "start"]

_START_SECONDS = 60.0
_STOP_SECONDS = 60.0
_SOCKET_PATH_BYTES = 107
_BUILTIN_LOCALE_SINCE = 17
_INITDB = ("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions")
_BUILTIN_LOCALE = ("--locale-provider=builtin", "--builtin-locale=C.UTF-8")
_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

# Not of those that a system gives to whoever wants any port: the next start would often find it taken.
_PORTS = range(10_000, 16_000)
# Orphans of a killed server need a moment to leave, and a free port may be taken before the server has it.
_PASSING = re.compile(r'pre-existing shared memory block|postmaster.pid" already exists|could not bind')


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. As a context manager it stops at the end, if this is who started it."""

    directory: Path
    port: int
    pid: int
    started: bool
    password: str = field(repr=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False, compare=False)

    @property
    def dsn(self) -> str:
        """The superuser's connection, over TCP on the loopback interface."""
        return f"postgresql://postgres:{self.password}@127.0.0.1:{self.port}/postgres"

    @property
    def socket_directory(self) -> Path | None:
        """The host to name for the Unix socket, unless the path rules one out."""
        run = self.directory / "run"
        return run if _socket_fits(run) else None

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which psql and its kin find this server."""
        place = {"PGHOST": "127.0.0.1", "PGPORT": str(self.port), "PGDATABASE": "postgres"}
        return {**place, "PGUSER": "postgres", "PGPASSWORD": self.password}

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop the server, whoever started it, and return when it is gone."""
        data = self.directory / "data"
        if _is_postmaster(self.pid, data):
            os.kill(self.pid, _SIGNALS[mode])
        deadline = time.monotonic() + _STOP_SECONDS
        while _is_postmaster(self.pid, data):
            if time.monotonic() > deadline:
                raise NoPostgres(f"The server in {self.directory} (pid {self.pid}) did not stop: {mode}")
            time.sleep(0.01)
        if self._process is not None:
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.started:
            self.stop()


def start(
    directory: Path | None = None,
    *,
    bin_dir: Path | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Server:
    """Return the server of this directory, started if need be; `settings` matter only then."""
    home = (directory or default_directory()).resolve()
    _make_home(home)
    with _locked(home):
        running = _running(home)
        if running is not None:
            return running
        account = account_for(home)
        binaries, major = runnable(bin_dir or find_binaries(), home, account)
        _initialise(home, binaries, major, account)
        return _launch(home, binaries, account, settings)


def running(directory: Path | None = None) -> Server | None:
    """Return the server of this directory if it runs, and start nothing."""
    home = (directory or default_directory()).resolve()
    return _running(home) if (home / "data").is_dir() else None


def default_directory() -> Path:
    """Where the server lives when nobody says: among the user's data, for root where others can reach it."""
    if os.geteuid() == 0:
        return Path("/var/lib/bartleby/dev")
    data_home = os.environ.get("XDG_DATA_HOME")
    return (Path(data_home) if data_home else Path.home() / ".local" / "share") / "bartleby" / "dev"


def _make_home(home: Path) -> None:
    root = os.geteuid() == 0
    try:
        for folder in reversed([path for path in (home, *home.parents) if not path.exists()]):
            folder.mkdir(exist_ok=True)
            if root:
                folder.chmod(0o755)  # whatever the umask: the server's account has to pass through
        if home.stat().st_uid != os.geteuid():
            raise NoPostgres(f"{home} belongs to another user: start the server as that user, or elsewhere.")
        # in this order: whoever starts at the same time makes the lock first
        if any(home.iterdir()) and not (home / "lock").exists():
            raise NoPostgres(f"{home} has other things in it: name an empty directory, or one not there yet.")
        home.chmod(0o711 if root else 0o700)
    except OSError as error:
        raise NoPostgres(f"The server cannot live in {home}: {error}") from error


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    with (home / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _running(home: Path) -> Server | None:
    deadline = time.monotonic() + _START_SECONDS
    while (seen := _read_pid_file(home)) is not None and _is_postmaster(seen.pid, home / "data"):
        if seen.ready:
            return Server(home, seen.port, seen.pid, started=False, password=(home / "password").read_text())
        if time.monotonic() > deadline:
            raise NoPostgres(f"The server in {home} (pid {seen.pid}) is not getting ready.\n{_tail(home)}")
        time.sleep(0.02)
    return None


@dataclass(frozen=True, slots=True)
class _PidFile:
    pid: int
    port: int
    ready: bool


def _read_pid_file(home: Path) -> _PidFile | None:
    try:
        lines = (home / "data" / "postmaster.pid").read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return None
    # They come one by one as the server starts: pid, directory, time, port, socket, address, memory, state.
    lines += [""] * (8 - len(lines))
    return _PidFile(int(lines[0] or 0), int(lines[3] or 0), lines[7].strip() == "ready")


def _is_postmaster(pid: int, data: Path) -> bool:
    # By its command line, which anybody may read: a pid alone may be a zombie, or another program by now.
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        if Path("/proc/self/cmdline").exists():
            return False
        seen = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, check=False)
        return os.fsencode(data) in seen.stdout
    return os.fsencode(data) in words


def _initialise(home: Path, binaries: Path, major: int, account: Account) -> None:
    data = home / "data"
    if data.exists():
        made_by = (data / "PG_VERSION").read_text().strip()
        if made_by != str(major):
            raise NoPostgres(
                f"{data} was made by PostgreSQL {made_by}, but {binaries} is {major}: point BARTLEBY_PG_BIN"
                f" at a PostgreSQL {made_by}, or move the directory away to begin anew."
            )
        return
    fresh, run, password = home / "data.new", home / "run", home / "password"
    shutil.rmtree(fresh, ignore_errors=True)
    for folder in (fresh, run):
        folder.mkdir(mode=0o700, exist_ok=True)
        account.own(folder)
    password.unlink(missing_ok=True)
    password.touch(mode=0o600, exist_ok=False)
    password.write_text(secrets.token_urlsafe(24))
    account.own(password)
    locale = _BUILTIN_LOCALE if major >= _BUILTIN_LOCALE_SINCE else ()
    options = ["-D", fresh, "-U", "postgres", f"--pwfile={password}", *_INITDB, *locale]
    done, said = account.run([binaries / "initdb", *options])
    if not done:
        raise NoPostgres(f"initdb could not make a cluster in {home}, as user {fresh.owner()}:\n{said}")
    os.chown(password, os.geteuid(), os.getegid())
    fresh.rename(data)


def _launch(home: Path, binaries: Path, account: Account, settings: Mapping[str, str]) -> Server:
    deadline = time.monotonic() + _START_SECONDS
    (home / "log").touch(mode=0o600)
    while True:
        (home / "log").write_bytes(b"")
        _forget_the_dead(home)
        port = _free_port(home)
        process = _spawn(home, binaries / "postgres", account, {**settings, "port": str(port)})
        try:
            if _becomes_ready(home, process, deadline):
                (home / "port").write_text(str(port))
                password = (home / "password").read_text()
                return Server(home, port, process.pid, started=True, password=password, _process=process)
        except BaseException:
            process.send_signal(signal.SIGQUIT)
            process.wait()
            raise
        if time.monotonic() > deadline or not _PASSING.search(_tail(home)):
            raise NoPostgres(f"PostgreSQL did not start in {home}. Its log ends with:\n{_tail(home)}")
        time.sleep(0.1)


def _forget_the_dead(home: Path) -> None:
    # PostgreSQL forgets a dead pid by itself, but never a zombie's, nor one that another program has by now.
    # Orphans of the old server still bar the start: it finds their shared memory by the directory's inode.
    seen = _read_pid_file(home)
    if seen is not None and not _is_postmaster(seen.pid, home / "data"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(seen.pid, 0)
            (home / "data" / "postmaster.pid").unlink(missing_ok=True)
    for left in (home / "run").glob(".s.PGSQL.*"):
        left.unlink()


def _free_port(home: Path) -> int:
    last = (home / "port").read_text() if (home / "port").exists() else ""
    fresh = random.sample(_PORTS, 10)
    for port in ([int(last)] if last.isdecimal() else []) + [*fresh, 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise NoPostgres("There is no free port on 127.0.0.1.")


def _spawn(home: Path, postgres: Path, account: Account, settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    run = str(home / "run").replace('"', '""')
    sockets = f'"{run}"' if _socket_fits(home / "run") else ""
    given = {"listen_addresses": "127.0.0.1", "unix_socket_directories": sockets, **settings}
    options = [word for name, value in given.items() for word in ("-c", f"{name}={value}")]
    with (home / "log").open("ab") as log:
        return account.popen([postgres, "-D", home / "data", *options], log)


def _becomes_ready(home: Path, process: subprocess.Popen[bytes], deadline: float) -> bool:
    while process.poll() is None:
        seen = _read_pid_file(home)
        if seen is not None and seen.pid == process.pid and seen.ready:
            return True
        if time.monotonic() > deadline:
            raise NoPostgres(f"PostgreSQL is not getting ready in {home}. Its log ends with:\n{_tail(home)}")
        time.sleep(0.01)
    return False


def _tail(home: Path) -> str:
    return "\n".join((home / "log").read_text(errors="replace").splitlines()[-15:])


def _socket_fits(run: Path) -> bool:
    # A comma is where libpq divides several hosts.
    return len(os.fsencode(run / ".s.PGSQL.65535")) <= _SOCKET_PATH_BYTES and "," not in str(run)
