"""Applications served by uvicorn, a project of Django, and a proxy in front of them."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

SERVE = """
import socket, sys, uvicorn
from importlib import import_module
module, _, name = sys.argv[1].partition(":")
listening = socket.create_server(("127.0.0.1", 0))
app = getattr(import_module(module), name)
print(listening.getsockname()[1], flush=True)
options = {"root_path": sys.argv[2]} if len(sys.argv) > 2 else {}
config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1, **options)
uvicorn.Server(config).run(sockets=[listening])
"""
SETTINGS = """
SECRET_KEY = "nobody else knows it"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "shop.urls"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"]
MIDDLEWARE = ["django.contrib.sessions.middleware.SessionMiddleware"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite3"}}
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
USE_TZ = True
"""
URLS = """
from django.contrib.auth import authenticate, login
from django.http import HttpResponse
from django.urls import path

def shop(request):
    return HttpResponse("the shop")

def sign_in(request, name):
    login(request, authenticate(request, username=name, password="open sesame"))
    return HttpResponse(status=204)

urlpatterns = [path("", shop), path("sign-in/<name>", sign_in)]
"""
PEOPLE = """
import django
django.setup()
from django.core.management import call_command
from django.contrib.auth.models import User
call_command("migrate", verbosity=0)
User.objects.create_superuser("ana", password="open sesame")
User.objects.create_user("ben", password="open sesame", is_staff=True)
User.objects.create_user("eve", password="open sesame")
"""


@dataclass(frozen=True)
class Serving:
    port: int
    process: subprocess.Popen[str]

    def visitor(self, **headers: str) -> httpx.Client:
        """Return a caller of this server that follows no redirects."""
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=30)

    def end(self) -> int:
        """Stop it as a deployment does; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def serving(dsn: str, folder: Path, app: str, *more: str, **environment: str) -> Iterator[Serving]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SERVE, app, *more],
        cwd=folder,
        env={**os.environ, "BARTLEBY_DSN": dsn, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server did not start"
        yield Serving(int(line), process)
    finally:
        process.kill()
        process.communicate()


def django_project(folder: Path) -> None:
    shop = folder / "shop"
    shop.mkdir()
    for name, text in {"__init__": "", "settings": SETTINGS, "urls": URLS}.items():
        (shop / f"{name}.py").write_text(text)
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "shop.settings"}
    subprocess.run([sys.executable, "-c", PEOPLE], cwd=folder, env=environment, check=True, timeout=60)


@contextlib.contextmanager
def proxy(port: int, *, strips: bool, forwards: bool = True) -> Iterator[int]:
    """Serve under /ops and another name; strip /ops or keep it, send X-Forwarded headers or not."""

    class Passing(BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            if not f"{self.path}/".startswith("/ops/"):
                self.send_error(404)
                return
            path = (self.path.removeprefix("/ops") or "/") if strips else self.path
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            headers |= {"Host": "console.internal:8467", "Connection": "close"}
            if forwards:
                forwarded = {"Host": self.headers["Host"], "Proto": "https", "For": self.client_address[0]}
                headers |= {f"X-Forwarded-{name}": value for name, value in forwarded.items()}
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            behind = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            with contextlib.closing(behind), contextlib.suppress(ConnectionError):
                behind.request(self.command, path, body, headers)
                answer = behind.getresponse()
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in {"transfer-encoding", "connection"}:
                        self.send_header(name, value)
                self.end_headers()
                while part := answer.read1():
                    self.wfile.write(part)

        do_GET = do_POST = do_DELETE = pass_on  # noqa: N815 - names of the library

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Passing) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
