"""RabbitMQ: one node for all tests of a process, each with a queue of its own. A gate before it is shut in no time.

The node takes some seconds to start. It listens on free loopback ports, has its files in a temporary folder, no plugins
and no service, and dies with the process that started it, as its epmd does.
"""

import asyncio
import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiormq
import trustme

from tests.kit.proxy import Proxy
from tests.kit.sinks.conformance import Sink
from tests.kit.sinks.servers import Process, eventually, free_port

PROGRAMS = Path("/usr/lib/rabbitmq/bin")
"""Those that Debian has on PATH in their place run as the account of the service, or not at all."""
TIED = ("setpriv", "--pdeathsig", "KILL")
LARGEST = 128 * 1024
CLOSED_PORT = 1


class Server:
    """One node; guest may do everything."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="bartleby-rabbitmq-"))
        self.port, epmd = free_port(), free_port()
        (self.folder / "plugins").write_text("[].\n")
        self.gate, self.tls_port, self.authority = Proxy(self.port), free_port(), self.folder / "authority.pem"
        authority, both = trustme.CA(), self.folder / "server.pem"
        authority.cert_pem.write_to_path(str(self.authority))
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(both))
        (self.folder / "rabbitmq.conf").write_text(
            f"""
            max_message_size = {LARGEST}
            disk_free_limit.absolute = 1MB
            listeners.ssl.1 = 127.0.0.1:{self.tls_port}
            ssl_options.certfile = {both}
            ssl_options.keyfile = {both}
            """
        )
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LC_ALL": "C.UTF-8",
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
        command = [*TIED, str(PROGRAMS / "rabbitmq-server")]
        self.process = Process("rabbitmq-server", command, self.port, self.folder, self._environment)
        names = [*TIED, "epmd", "-address", "127.0.0.1", "-port", str(epmd)]
        self._epmd = subprocess.Popen(names, env=self._environment, stderr=subprocess.DEVNULL)
        atexit.register(self._close)

    def url(self, port: int | None = None) -> str:
        return f"amqp://guest:guest@127.0.0.1:{port or self.port}/"

    async def start(self) -> None:
        """Start it, with the data it had, and return when it takes clients; nothing to do if it runs."""
        if not self.process.running:
            await self.process.start()
        await eventually(self._answers)

    async def control(self, *words: str) -> None:
        """Run rabbitmqctl; about a second."""
        command = [str(PROGRAMS / "rabbitmqctl"), *words]
        done = await asyncio.to_thread(
            subprocess.run, command, env=self._environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    @contextlib.asynccontextmanager
    async def channel(self) -> "AsyncIterator[aiormq.abc.AbstractChannel]":
        connection = await aiormq.connect(self.url())
        try:
            yield await connection.channel()
        finally:
            with contextlib.suppress(aiormq.AMQPError):
                await connection.close()

    async def count(self, queue: str) -> int:
        with contextlib.suppress(aiormq.ChannelNotFoundEntity):
            async with self.channel() as channel:
                return (await channel.queue_declare(queue, passive=True)).message_count or 0
        return 0

    async def read(self, queue: str) -> AsyncIterator[tuple[str, bytes]]:
        """Return what is in a queue, and leave it there."""
        left = await self.count(queue)
        found: asyncio.Queue[aiormq.abc.DeliveredMessage] = asyncio.Queue()
        async with self.channel() as channel:
            if left:
                await channel.basic_consume(queue, found.put)
            for _ in range(left):
                message = await asyncio.wait_for(found.get(), 20)
                yield str(message.header.properties.message_id), message.body

    async def _answers(self) -> bool:
        with contextlib.suppress(OSError, aiormq.AMQPError):
            async with self.channel():
                return True
        return False

    def _close(self) -> None:
        self.process.end()
        self._epmd.kill()
        self._epmd.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


shared = functools.cache(Server)


class Harness(Sink):
    """stop() shuts the gate; kill() and hang() are for the node itself."""

    kind = "rabbitmq"
    too_large = LARGEST + 1

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.process = shared().process
        self._queue = f"events-{uuid.uuid4().hex[:12]}"

    @classmethod
    def missing(cls) -> str | None:
        if os.access(PROGRAMS / "rabbitmq-server", os.X_OK) and shutil.which("epmd") and shutil.which("setpriv"):
            return None
        return "there is no rabbitmq-server on this machine (Debian: apt-get install rabbitmq-server)"

    def options(self) -> dict[str, Any]:
        """Return options by which the queue is made when it is first used."""
        return {"url": shared().url(shared().gate.port), "routing_key": self._queue, "declare": True}

    async def start(self) -> None:
        await shared().start()
        shared().gate.lead_to(shared().port)

    async def stop(self) -> None:
        shared().process.thaw()
        shared().gate.lead_to(CLOSED_PORT)
        shared().gate.cut()

    async def outlast(self) -> None:
        """A node that is killed right after it declared a queue does not have it any more, whatever it confirmed."""
        await shared().control("eval", "ok = mnesia:sync_log().")

    def records(self) -> AsyncIterator[tuple[str, bytes]]:
        return shared().read(self._queue)

    async def count(self) -> int:
        return await shared().count(self._queue)
