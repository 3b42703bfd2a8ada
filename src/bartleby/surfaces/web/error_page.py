"""A page that says what went wrong, and needs neither the database nor a template."""

import logging
from collections.abc import Callable, Mapping
from html import escape
from typing import cast

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from bartleby.surfaces.web.paths import link

ErrorPage = Callable[[Request, Mapping[str, object]], str]
_log = logging.getLogger("bartleby.console")

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { margin: 10vh auto; max-width: 40rem; padding: 0 1rem }
code, pre { font-family: ui-monospace, monospace }
"""


def page(request: Request, document: Mapping[str, object], headers: Mapping[str, str]) -> Response:
    """Return a problem as a page: that of the console (`app.state.error_page`), or a plain one."""
    dressed = cast("ErrorPage | None", getattr(request.app.state, "error_page", None))
    status = cast("int", document["status"])
    return HTMLResponse(_dressed(dressed, request, document) or _plain(request, document), status, dict(headers))


def _dressed(made: ErrorPage | None, request: Request, document: Mapping[str, object]) -> str | None:
    try:
        return None if made is None else made(request, document)
    except Exception:  # noqa: BLE001 - whatever a template can do wrong
        # whoever has one problem must not get a second one instead of its explanation
        _log.exception("%s: the page for a problem cannot be shown", document["request_id"])
        return None


def _plain(request: Request, document: Mapping[str, object]) -> str:
    said = {name: escape(str(value)) for name, value in document.items()}
    nonce = escape(getattr(request.state, "nonce", ""))
    hint = f"<p>{said['hint']}</p>" if "hint" in said else ""
    pointed = f"<pre>{said['pointed']}</pre>" if "pointed" in said else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{said["title"]} - Bartleby</title>'
        f'<meta name="viewport" content="width=device-width"><style nonce="{nonce}">{STYLE}</style>'
        f"<main><h1>{said['title']}</h1><p>{said['detail']}</p>{pointed}{hint}"
        f'<p><a href="{escape(link(request.scope, "/"))}">Start again</a></p>'
        f"<p><small>{said['status']}, request <code>{said['request_id']}</code></small></p></main></html>"
    )
