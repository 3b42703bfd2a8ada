"""Every call of a tool is a line of the audit, also one that failed or was refused; no answer is given without it.

The line has the tool and its arguments, without what may be a value of a payload: of a filter only its fields and what
cannot be such a value. Texts that are free, as reasons are, stand in the lines of the deeds themselves.
"""

import json
import logging
import re
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import psycopg
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR

from bartleby.errors import BartlebyError
from bartleby.principal import Principal
from bartleby.surfaces.mcp.house import Calling, House, beginning

_log = logging.getLogger("bartleby.mcp")
_LEFT_OUT = "…"
_MOST_NAMED, _MOST_TERMS = 20, 30
_MOST_SAID = 1800  # characters of values; with twenty long names that is what a note may have
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,80}")
_TERM = re.compile(r'(?:"(?:[^"\\]|\\.)*"?|[^\s"])+')
_FIELD = re.compile(r"(-?)([a-z]{1,20})(\.[\w.\[\]-]{1,80})?:", re.IGNORECASE)
_VALUE = re.compile(r"[\w.,:<>=+*-]{1,80}", re.ASCII)
# Fields of a filter whose values are not those of a payload.
_OURS = frozenset(
    {"queue", "status", "group", "type", "id", "reason", "age", "dead", "attempts", "cycle", "generation", "held"}
    | {"edited", "erased", "replay", "fingerprint"}
)
# Arguments whose values are said; of others, and of free texts, only that they were there.
_SAID = frozenset(
    {"filter", "limit", "sort", "message_id", "group_id", "replay_id", "queue", "states", "hash", "ids"}
    | {"canary", "rate", "window"}
)


class Auditing:
    """Middleware of the server: knows who calls, and writes the line."""

    def __init__(self, house: House) -> None:
        self._house = house

    async def __call__(self, ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
        """Let a message through; a call of a tool is audited."""
        if ctx.method != "tools/call":
            return await call_next(ctx)
        calling = Calling(self._who(ctx.request), f"mcp-{secrets.token_hex(6)}")
        try:
            with beginning(calling):
                result = await call_next(ctx)
        except BaseException as error:
            await self._noted(calling, ctx.params, calling.problem or type(error).__name__)
            raise
        failed = isinstance(result, dict) and bool(result.get("isError"))
        problem = (calling.problem or "refused arguments") if failed else None
        if not await self._noted(calling, ctx.params, problem) and not failed:
            raise MCPError(code=INTERNAL_ERROR, message="the call could not be audited, so there is no answer to it")
        return result

    def _who(self, request: Any) -> Principal:  # noqa: ANN401 - the request of whatever transport
        principal = getattr(getattr(request, "state", None), "principal", None) or self._house.principal
        if not isinstance(principal, Principal):
            raise MCPError(code=INTERNAL_ERROR, message="nobody knows who calls")
        return principal

    async def _noted(self, calling: Calling, params: Mapping[str, Any] | None, problem: str | None) -> bool:
        subject = {**told(params or {}), "outcome": "done" if problem is None else "failed"}
        if problem is not None:
            subject["problem"] = problem
        note = partial(
            self._house.reader.note,
            "agent.call",
            subject,
            actor=calling.principal.name,
            request_id=calling.request_id,
        )
        try:
            # whoever hangs up does not get away without a line
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(note)
        except (BartlebyError, psycopg.Error) as error:
            _log.warning("a call of %s was not audited: %s", calling.principal.name, error)
            return False
        return True


def told(params: Mapping[str, Any]) -> dict[str, object]:
    """Return what the audit is told of a call."""
    arguments = params.get("arguments")
    named = list(arguments.items())[:_MOST_NAMED] if isinstance(arguments, Mapping) else []
    known: dict[str, object] = {}
    room = _MOST_SAID
    for name, each in named:
        if _PLAIN.fullmatch(str(name)):
            value = _value(name, each)
            length = len(json.dumps(value, ensure_ascii=False))
            known[name] = value if length <= room else _LEFT_OUT
            room -= length if length <= room else 0
    return {"tool": _plain(params.get("name")), "arguments": known}


def masked(filter: str) -> str:
    """Return a filter without what may be a value of a payload: `queue:billing payload.customer.id:…`."""
    terms = _TERM.findall(filter[:2000])
    shown = [_masked_term(each) for each in terms[:_MOST_TERMS]]
    return " ".join([*shown, _LEFT_OUT] if len(terms) > _MOST_TERMS else shown)


def _masked_term(term: str) -> str:
    found = _FIELD.match(term)
    if found is None:
        return _LEFT_OUT
    value = term[found.end() :]
    ours = found[2].lower() in _OURS and found[3] is None
    return found[0] + (value if ours and _VALUE.fullmatch(value) else _LEFT_OUT)


def _value(name: str, value: object) -> object:
    if name not in _SAID:
        return _LEFT_OUT
    if name == "filter":
        return masked(value) if isinstance(value, str) else _LEFT_OUT
    if isinstance(value, list):
        return [_plain(each) for each in value[:_MOST_NAMED]] + ([_LEFT_OUT] if len(value) > _MOST_NAMED else [])
    return _plain(value)


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool):
        return value
    return value if isinstance(value, int | float) and abs(value) < 2**63 else _text(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) and _PLAIN.fullmatch(value) else _LEFT_OUT
