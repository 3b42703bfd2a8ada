"""`bartleby console`: where it listens, whom it lets in, and its settings."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from fastapi import FastAPI

from bartleby import Client
from bartleby.errors import InvalidSettings
from bartleby.surfaces.cli import cli
from bartleby.surfaces.listening import listening, serve
from bartleby.surfaces.web import ConsoleSettings, ProxySettings
from bartleby.surfaces.web.configuring import Serving, load
from tests.web.conftest import add_token

OPENAPI = "api/v1/openapi.json"
MAIN = "from bartleby.surfaces.cli import main; main()"
TOML = """
[console]
port = 9000
environment = "staging"
hosts = ["ops.example"]
hidden = ["email"]
session_hours = 1.5

[console.proxy]
networks = ["10.0.0.0/8"]
roles_header = "X-Groups"
roles = { sre = "operator" }
"""


class Running:
    """A console in its own process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process, self.errors, stderr = process, list[str](), process.stderr
        self.reading = threading.Thread(target=lambda: self.errors.extend(stderr), daemon=True)
        self.reading.start()
        self.url = process.stdout.readline().strip()
        if not self.url:
            process.wait(60)
            self.reading.join(60)

    def get(self, path: str = OPENAPI, **headers: str) -> httpx.Response:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx.get(self.url + path, headers=names, timeout=60)


Command = Callable[..., Running]


@pytest.fixture
def command(dsn: str, tmp_path: Path) -> Iterator[Command]:
    """Start `bartleby console` on a free port and wait until it prints its address or ends."""
    with contextlib.ExitStack() as opened:

        def start(*words: str, address: str = dsn, port: str = "0", code: str = MAIN, **more: str) -> Running:
            environment = {**os.environ, "BARTLEBY_DSN": address, "PYTHONUNBUFFERED": "1", **more}
            line = [sys.executable, "-c", code, "console", "--port", port, *words]
            pipe = subprocess.PIPE
            process = opened.enter_context(
                subprocess.Popen(line, env=environment, cwd=tmp_path, text=True, stdout=pipe, stderr=pipe)
            )
            opened.callback(process.kill)
            return Running(process)

        yield start


def test_console_serves_this_machine_only(command: Command) -> None:
    running = command("--allow-host", "ops.example")
    assert re.fullmatch(r"http://localhost:\d+/", running.url)
    answer = running.get("api/v1/health")
    assert (answer.json()["status"], "server" in answer.headers) == ("ok", False)
    for host, status in (("evil.example", 403), ("ops.example", 200)):
        assert running.get(Host=host).status_code == status, host
    # uvicorn alone would trust these headers from this machine
    refused = running.get(X_Forwarded_For="10.0.0.1", X_Forwarded_Proto="https")
    assert (refused.status_code, "--proxy" in refused.json()["hint"]) == (403, True)
    second = command(port=running.url.rpartition(":")[2].strip("/"))
    assert (second.process.returncode, "--port" in "".join(second.errors)) == (1, True)


def test_console_starts_without_its_database(command: Command) -> None:
    answer = command(address="host=127.0.0.1 port=1 dbname=x").get("api/v1/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "database away")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_a_console_with_open_streams(command: Command, how: signal.Signals) -> None:
    # no stream ends because it is cut off, or at the next beat
    patient = "from bartleby.surfaces import listening\nfrom bartleby.surfaces.web import live\n"
    running = command(code=f"{patient}listening._GRACE_SECONDS = live.BEAT = 3600\n{MAIN}")
    with contextlib.ExitStack() as opened:
        client = opened.enter_context(httpx.Client(timeout=60))
        streams = [opened.enter_context(client.stream("GET", f"{running.url}live")).iter_lines() for _ in range(3)]
        for lines in streams:
            assert any(each.startswith("event:") for each in lines)  # and not further
        running.process.send_signal(how)
        for lines in streams:  # each ends without another look at the database
            assert not [each for each in lines if each.startswith("event:")]
        assert running.process.wait(60) == 0
    running.reading.join(60)
    assert running.errors[-1] == "stopped\n"
    assert not any(each in "".join(running.errors) for each in ("Traceback", "Cancelled", "Cancel "))


def test_signal_that_comes_with_the_address_stops_the_server() -> None:
    """Before uvicorn has its handlers, a signal that comes during an import would be swallowed."""
    handlers: list[object] = []

    def announce() -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with listening("127.0.0.1", 0, option="--port") as opened, pytest.raises(KeyboardInterrupt):
            serve(FastAPI(), opened, announce)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [getattr(each, "__name__", "") for each in handlers] == ["handle_exit"]


def test_console_beyond_this_machine_does_not_start_without_authentication(dsn: str) -> None:
    def refused(*words: str) -> None:
        done = CliRunner().invoke(cli, ["--dsn", dsn, "console", "--port", "0", *words])
        assert done.exit_code == 1, words
        text = f"{done.stderr} {done.exception} {getattr(done.exception, 'hint', '')}"
        assert "bartleby tokens add NAME" in text, words

    for words in (["0.0.0.0"], ["::"], ["192.0.2.1", "--proxy", "10.0.0.0/8", "--proxy-user-header", ""]):  # noqa: S104
        refused("--host", *words)
    add_token(dsn, "admin")
    for words in (["--no-auth"], ["--no-auth", "--proxy", "10.0.0.0/8"]):
        refused("--host", "0.0.0.0", *words)  # noqa: S104


def test_console_beyond_this_machine_requires_a_token(dsn: str, command: Command) -> None:
    token = add_token(dsn, "reader")
    running = command("--host", "0.0.0.0")  # noqa: S104
    assert running.get().status_code == 401
    assert running.get(Authorization=f"Bearer {token}").status_code == 200
    assert running.get(X_Forwarded_User="ann").status_code == 401
    assert command("--auth").get().status_code == 401


def test_console_behind_a_proxy(command: Command) -> None:
    words = ["--proxy", "127.0.0.0/8", "--proxy-user-header", "X-User", "--proxy-roles-header", "X-Groups"]
    running = command(*words, "--proxy-role", "sre=operator", "--prefix", "/ops/", "--environment", "production")
    assert running.url.endswith("/ops/")
    assert running.get(X_User="ann", X_Groups="sre").status_code == 200
    running.url = running.url.removesuffix("ops/")  # the proxy strips the prefix
    assert running.get(X_User="ann", X_Groups="sre").status_code == 200
    assert running.get(X_User="ann").status_code == 401
    assert running.get("queues").headers["location"] == "/ops/login?next=%2Fops%2Fqueues"


def test_missing_extra_is_named(command: Command, tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError(\"No module named 'fastapi'\", name='fastapi')")
    running = command(PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert running.process.returncode == 1
    assert "pip install 'bartleby[web]'" in "".join(running.errors)


def read(folder: Path, variables: dict[str, str] | None = None, **arguments: object) -> Serving:
    return load(arguments, variables=variables or {}, directory=folder)


def test_arguments_override_the_environment_which_overrides_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bartleby.toml").write_text(f'dsn = "dbname=file"\n{TOML}')
    proxy = ProxySettings(("10.0.0.0/8",), roles_header="X-Groups", roles={"sre": "operator"})
    settings = ConsoleSettings(
        environment="staging", hosts=("ops.example",), hidden=("email",), session_hours=1.5, proxy=proxy
    )
    assert read(tmp_path) == Serving("127.0.0.1", 9000, None, settings)
    given = {
        "PORT": "9001", "ENVIRONMENT": "production", "AUTHENTICATE": "yes", "HIDDEN": "email, phone",
        "PROXY_ROLES": "boss=admin, sre=reader", "PROXY_USER_HEADER": "",
    }  # fmt: skip
    variables = {f"BARTLEBY_CONSOLE_{name}": value for name, value in given.items()}
    named = replace(proxy, roles={"boss": "admin", "sre": "reader"})
    settings = replace(settings, environment="production", hidden=("email", "phone"), proxy=named)
    found = read(tmp_path, variables, port=9002, hosts=(), environment=None)
    assert found == Serving("127.0.0.1", 9002, True, settings)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BARTLEBY_DSN", raising=False)
    assert Client()._settings.dsn == "dbname=file", "a client ignores the table of the console"
    networks = ("10.0.0.0/8",)
    for header, expected in (("", None), (None, proxy.user_header)):  # an empty variable counts as unset, as everywhere
        known = read(tmp_path, proxy_networks=networks, proxy_user_header=header).settings.proxy
        assert (known and known.user_header) == expected
    (tmp_path / "bartleby.toml").write_text('[console.proxy]\nnetworks = ["10.0.0.0/8"]\nuser_header = ""\n')
    assert read(tmp_path).settings.proxy == ProxySettings(networks, user_header=None)


def test_invalid_setting_is_named(tmp_path: Path) -> None:
    for text, named in (
        ("port = 70000", "port"), ("port = true", "port"), ("colour = 1", "colour"), ("hosts = 3", "hosts"),
        ("authenticate = 'perhaps'", "authenticate"), ("session_hours = 0", "session_hours"), ("prefix = 3", "prefix"),
        ("proxy = 1", "proxy"), ("proxy = {user_header = 'x'}", "networks"), ("streams = 'many'", "streams"),
        ("proxy = {networks = ['10.0.0.1/8']}", "network"), ("proxy = {networks = []}", "networks"),
        ("proxy = {networks = ['10.0.0.0/8'], roles = {a = 'king'}}", "king"),
    ):  # fmt: skip
        (tmp_path / "bartleby.toml").write_text(f"[console]\n{text}\n")
        with pytest.raises(InvalidSettings, match=named):
            read(tmp_path)
    (tmp_path / "bartleby.toml").write_text("console = 3\n")
    with pytest.raises(InvalidSettings, match="console"):
        read(tmp_path)
    (tmp_path / "bartleby.toml").unlink()
    for name in ("BARTLEBY_CONSOLE_PORT", "BARTLEBY_CONSOLE_PROXY_ROLES"):
        with pytest.raises(InvalidSettings, match=f"^{name} cannot be "):
            read(tmp_path, {name: "x\x1b"})


def test_listening_socket_is_known_as_tcp() -> None:
    # asyncio disables Nagle's algorithm only on such sockets: otherwise each answer took 44 ms instead of 1.3 ms
    with listening("127.0.0.1", 0, option="--port") as opened:
        assert opened.proto == socket.IPPROTO_TCP
