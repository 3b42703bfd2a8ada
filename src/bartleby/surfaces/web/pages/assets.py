"""What pages are dressed in: scripts and styles from this package, under an address that changes when they do.

Only these are packed. A page has texts of strangers (a filter in its address, a payload) beside what is to stay secret
(the payloads of others), and how small both together can be packed would tell whoever counts bytes about the secret.
"""

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

_FOLDER = Path(__file__).parent.parent / "static"
_FOR_EVER = "public, max-age=31536000, immutable"
_WORTH_IT = 500

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    packed: bytes | None
    kind: str


@cache
def _files() -> dict[str, _File]:
    found = {}
    for path in sorted(_FOLDER.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            found[path.relative_to(_FOLDER).as_posix()] = _read(path)
    return found


def _read(path: Path) -> _File:
    body = path.read_bytes()
    packed = gzip.compress(body, 9, mtime=0)
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    if kind.startswith("text/"):
        kind += "; charset=utf-8"
    return _File(body, packed if len(body) > _WORTH_IT and len(packed) < len(body) else None, kind)


@cache
def digest() -> str:
    """Return a name for all of them together: modules import each other by relative addresses."""
    total = hashlib.sha256()
    for name, file in _files().items():
        total.update(name.encode() + b"\0" + file.body)
    return total.hexdigest()[:16]


def asset(name: str) -> str:
    """Return the address of one, without the prefix of the console."""
    if name not in _files():
        raise LookupError(f"there is no asset {name}")
    return f"/static/{digest()}/{name}"


@router.get("/static/{version}/{name:path}")
def static(request: Request, version: str, name: str) -> Response:
    """Return a script or a style; a page that was open before an upgrade gets the new one."""
    file = _files().get(name)
    if file is None:
        raise HTTPException(404, "there is no such file")
    headers = {
        "Cache-Control": _FOR_EVER if version == digest() else "no-cache",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
    }
    if file.packed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, media_type=file.kind, headers={**headers, "Content-Encoding": "gzip"})
    return Response(file.body, media_type=file.kind, headers=headers)
