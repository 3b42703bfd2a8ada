"""A RabbitMQ of our own: one node on free loopback ports, its files in a temporary folder, no plugins, no service.

It takes some seconds to start, so one is shared by all tests of a process (`shared()`); each has a queue of its own.
The node and its epmd die with the process that started them.
"""

import asyncio
import atexit
import contextlib
import functools
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiormq

from tests.kit.sinks.servers import free_port

PROGRAMS = Path("/usr/lib/rabbitmq/bin")
"""Those that Debian has on PATH in their place run as the account of the service, or not at all."""
LARGEST = 128 * 1024
STARTING = 100.0
STOPPING = 30.0


def missing() -> str | None:
    """Return how to get the server, if it is not on this machine."""
    if os.access(PROGRAMS / "rabbitmq-server", os.X_OK) and shutil.which("epmd") and shutil.which("setpriv"):
        return None
    return "there is no rabbitmq-server on this machine (Debian: apt-get install rabbitmq-server)"


@functools.cache
def shared() -> "Server":
    """Return the server of this process, running."""
    server = Server()
    atexit.register(server.close)
    return server


class Server:
    """One node; guest may do everything."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bartleby-rabbitmq-"))
        self.port, epmd = free_port(), free_port()
        (self.folder / "plugins").write_text("[].\n")
        (self.folder / "rabbitmq.conf").write_text(f"max_message_size = {LARGEST}\ndisk_free_limit.absolute = 1MB\n")
        self._settings = {
            "HOME": str(self.folder),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(epmd),
            "RABBITMQ_ALLOW_INPUT": "1",  # no shell in between: the process is the node
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq"),
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_NODENAME": f"bartleby-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
        }
        self._epmd = self._popen(["epmd", "-address", "127.0.0.1", "-port", str(epmd)])
        self._node: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def url(self, port: int | None = None) -> str:
        """Return the address for clients, or that of something before it."""
        return f"amqp://guest:guest@127.0.0.1:{port or self.port}/"

    def start(self) -> None:
        """Start it, with the data it had, and return when it takes connections; nothing to do if it runs."""
        if self._node is not None and self._node.poll() is None:
            return
        self._node = self._popen([str(PROGRAMS / "rabbitmq-server")])
        deadline = time.monotonic() + STARTING
        while not self._accepts():
            said = (self.folder / "out").read_text(errors="replace")[-3000:]
            assert self._node.poll() is None, f"rabbitmq-server ended:\n{said}"
            assert time.monotonic() < deadline, f"rabbitmq-server does not listen:\n{said}"
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop it in good order; nothing to do if it does not run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Accept connections and bytes, and answer nothing."""
        assert self._node is not None
        self._node.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30
        threads = list(Path(f"/proc/{self._node.pid}/task").glob("*/stat"))
        while any(each.read_text().rpartition(")")[2].split()[0] != "T" for each in threads):  # it takes its time
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def thaw(self) -> None:
        if self._node is not None and self._node.poll() is None:
            self._node.send_signal(signal.SIGCONT)

    def control(self, *words: str) -> None:
        """Run rabbitmqctl; about a second."""
        command = [str(PROGRAMS / "rabbitmqctl"), *words]
        done = subprocess.run(command, env=self._environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def write_definitions(self) -> None:
        """Have it write down which queues it has. It says that there is one, and confirms messages in it, before."""
        self.control("eval", "ok = mnesia:sync_log().")

    def close(self) -> None:
        self.kill()
        self._epmd.kill()
        self._epmd.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def read(self, queue: str) -> "list[aiormq.abc.DeliveredMessage]":
        """Return what is in a queue, and leave it there."""
        connection = await aiormq.connect(self.url())
        found = []
        with contextlib.suppress(aiormq.ChannelNotFoundEntity):
            channel = await connection.channel()
            while isinstance((message := await channel.basic_get(queue)).delivery, aiormq.spec.Basic.GetOk):
                found.append(message)
        await connection.close()
        return found

    def _end(self, number: signal.Signals) -> None:
        if self._node is None:
            return
        self.thaw()
        self._node.send_signal(number)
        try:
            self._node.wait(STOPPING)
        finally:
            self._node.kill()
            self._node.wait()

    def _accepts(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
                probe.sendall(b"AMQP\x00\x00\x09\x01")
                return bool(probe.recv(1))
        except OSError:
            return False

    def _popen(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "out").open("ab") as out:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", **self._settings}


class Gate:
    """A port before the server that can be shut: for a client as good as a server that is stopped, and much faster.

    With a certificate it speaks TLS to clients.
    """

    def __init__(self, server: int, certificate: ssl.SSLContext | None = None) -> None:
        self.port = free_port()
        self._far = server
        self._certificate = certificate
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, ssl=self._certificate)

    async def shut(self) -> None:
        """Refuse clients, and cut off those that are there."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for each in list(self._ends):
            each.transport.abort()
        if self._carrying:
            await asyncio.wait(self._carrying)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._carry(reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        self._ends.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._far)
            ends.add(far_writer)
            self._ends.add(far_writer)
            both = [asyncio.ensure_future(_copy(reader, far_writer)), asyncio.ensure_future(_copy(far_reader, writer))]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for each in ends:
                each.transport.abort()
            await asyncio.wait(both)
        except OSError:
            writer.transport.abort()
        finally:
            self._ends -= ends


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while some := await reader.read(65536):
            writer.write(some)
            await writer.drain()
