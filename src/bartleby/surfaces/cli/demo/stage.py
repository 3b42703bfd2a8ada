"""Where the demo plays: a folder with a server and a shop in it. When it is left, nothing of it remains."""

import contextlib
import os
import resource
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from bartleby import dev
from bartleby.client import Client
from bartleby.surfaces.cli.connecting import prepare
from bartleby.surfaces.cli.demo import traffic
from bartleby.surfaces.cli.demo.booth import Booth, missing
from bartleby.surfaces.cli.demo.crew import Crew
from bartleby.surfaces.cli.demo.shield import SIGNALS

WORKERS = 2
BUG, _MENDED = "DISCOUNTS[customer]", "DISCOUNTS.get(customer, 0)"
_OLD, _NEW = 'version="1.0"', 'version="1.1"'
_REMOVE_SECONDS = 10.0


class Stage:
    """A server, a shop's code, the workers that run it and the traffic they get."""

    def __init__(self, folder: Path, server: dev.Server, client: Client, booth: Booth) -> None:
        self.dsn = server.dsn
        self.client = client
        self.shop = folder / "shop"
        self.booth = booth
        self.crew = Crew(self.shop, server.dsn, WORKERS)
        self.traffic = traffic.Traffic(client)

    def prepare(self) -> None:
        """Make the queues, and the directory that a user's code would be in."""
        self.shop.mkdir()
        shutil.copy(Path(__file__).with_name("shop.py"), self.shop)
        self.mail_server("flaky")
        for queue, policy in traffic.QUEUES.items():
            self.client.create_queue(queue, policy)

    def mail_server(self, state: str) -> None:
        """Let the mail server be up, flaky or down."""
        self._write("mail-server", state)

    def mend(self) -> bool:
        """Mend the bug of the invoices as somebody with an editor would, unless it is; the crew notices."""
        code = (self.shop / "shop.py").read_text(encoding="utf-8")
        if BUG in code:
            self._write("shop.py", code.replace(BUG, _MENDED).replace(_OLD, _NEW))
        return BUG in code

    def _write(self, name: str, text: str) -> None:
        # not in place: a worker may be reading it
        (self.shop / "new").write_text(text, encoding="utf-8")
        (self.shop / "new").rename(self.shop / name)


@contextlib.contextmanager
def stage(*, console: bool) -> Iterator[Stage]:
    """Yield the stage, with a console if it can be had. However it is left, no process and no file of it remains."""
    with _one_interrupt(), contextlib.ExitStack() as left:
        # its name is known before it is there, so that Ctrl-C at no moment leaves it behind
        folder = Path(tempfile.gettempdir()) / f"bartleby-demo-{secrets.token_hex(8)}"
        left.callback(_remove, folder)
        folder.mkdir(mode=0o700)
        if os.geteuid() == 0:
            folder.chmod(0o711)  # the server's account, which is not root, has to pass through
        left.callback(_stop_if_running, folder)
        # it is thrown away, so nothing has to reach the disk
        server = dev.start(folder / "server", settings={"fsync": "off"})
        left.callback(server.stop, "immediate")
        booth = Booth(folder, server.dsn)
        left.callback(booth.kill)
        if console and not missing():
            booth.open()  # it starts while the schema is installed
        prepare(server.dsn)
        client = left.enter_context(Client(server.dsn))
        built = Stage(folder, server, client, booth)
        built.prepare()
        left.callback(built.crew.kill)
        left.callback(_be_deaf)
        yield built


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    # The first signal ends the demo, and a second must not interrupt the clearing up. Killed workers dump no cores.
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        _be_deaf()
        raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in SIGNALS}
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
        for each, handler in before.items():
            signal.signal(each, handler)


def _be_deaf() -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)


def _stop_if_running(folder: Path) -> None:
    if (server := dev.running(folder / "server")) is not None:
        server.stop("immediate")


def _remove(folder: Path) -> None:
    # the last processes of a server that was stopped at once may still be writing
    deadline = time.monotonic() + _REMOVE_SECONDS
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
