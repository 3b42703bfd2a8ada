"""What is hidden where a secret is not under its own name: in filters, patches, rules, and lines of the audit."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bartleby.documents import HIDDEN, Number, Redaction, parsed, written
from bartleby.evidence import AuditLine, GroupRule, SharedValue
from bartleby.replays import Change, Replay, ReplayItem

_PATHS = re.compile(r"""(?:payload|headers)\.((?:[^\s:"]|"(?:[^"\\]|\\.)*")+)""", re.IGNORECASE)
_SEGMENT = re.compile(r""""((?:[^"\\]|\\.)*)"|([^."\[\]]+)""")
_ESCAPED = re.compile(r"\\(.)")
_TAKING = frozenset({"test", "copy", "move"})


def secret_in_filter(redaction: Redaction, filter: str) -> str | None:
    """Return the first name in a filter whose values are hidden."""
    return next((name for path in _PATHS.findall(filter) if (name := secret_in_path(redaction, path))), None)


def secret_in_path(redaction: Redaction, path: str) -> str | None:
    """Return the first name in a path (`payload.customer."a.b"`) whose values are hidden."""
    names = (_ESCAPED.sub(r"\1", quoted or plain) for quoted, plain in _SEGMENT.findall(path))
    return next(filter(redaction.secret, names), None)


def secret_in_pointer(redaction: Redaction, pointer: str) -> str | None:
    """Return the first name in a JSON Pointer (`/customer/a~1b`) whose values are hidden."""
    names = (each.replace("~1", "/").replace("~0", "~") for each in pointer.split("/"))
    return next(filter(redaction.secret, names), None)


def secret_in_patch(redaction: Redaction, raw: str) -> str | None:
    """Return what a patch would tell that is hidden: it compares it, or takes it to where it is not."""
    for operation in _operations(raw):
        if operation.get("op") in _TAKING:
            for pointer in (operation.get("from"), operation.get("path")):
                if isinstance(pointer, str) and (name := secret_in_pointer(redaction, pointer)):
                    return name
            if redaction.document(written(operation.get("value"))).hidden:
                return str(operation.get("path"))
    return None


def filter_text(redaction: Redaction, filter: str | None) -> str | None:
    """Return a filter without secrets: whole, or not at all."""
    if filter is None:
        return None
    return HIDDEN if secret_in_filter(redaction, filter) else redaction.words(filter)


def words(redaction: Redaction, text: str | None) -> str | None:
    """Return a text without what looks like a secret in it."""
    return None if text is None else redaction.words(text)


def document(redaction: Redaction, raw: str | None) -> str | None:
    """Return a document without its secrets."""
    return None if raw is None else redaction.document(raw).text


def at_path(redaction: Redaction, path: str | None, raw: str | None) -> str | None:
    """Return a value that was found at a path, without secrets."""
    if raw is not None and path is not None and secret_in_path(redaction, path):
        return json.dumps(HIDDEN)
    return document(redaction, raw)


def plan(redaction: Redaction, plan: Replay) -> Replay:
    """Return a plan without secrets in its filter, its patch and its words."""
    return replace(
        plan,
        filter=filter_text(redaction, plan.filter),
        raw_patch=None if plan.raw_patch is None else written(_hidden(redaction, _tree(plan.raw_patch))),
        reason=redaction.words(plan.reason),
        cause=words(redaction, plan.cause),
    )


def item(redaction: Redaction, item: ReplayItem) -> ReplayItem:
    """Return an item of a plan without secrets in its problem."""
    return replace(item, problem=words(redaction, item.problem))


def change(redaction: Redaction, change: Change, patch: str | None) -> Change:
    """Return what a patch does to one payload, without secrets; nothing of it if the patch moves them about."""
    moved = patch is not None and secret_in_patch(redaction, patch) is not None
    after = json.dumps(HIDDEN) if moved and change.raw_after is not None else document(redaction, change.raw_after)
    return replace(
        change,
        raw_before=document(redaction, change.raw_before),
        raw_after=after,
        problem=HIDDEN if moved and change.problem else words(redaction, change.problem),
    )


def shared(redaction: Redaction, value: SharedValue) -> SharedValue:
    """Return a value that letters share, without secrets."""
    return replace(value, raw=at_path(redaction, value.path, value.raw) or "null")


def rule(redaction: Redaction, rule: GroupRule) -> GroupRule:
    """Return a rule without secrets."""
    raw = at_path(redaction, rule.path, rule.raw)
    return replace(rule, raw=raw, fingerprint=words(redaction, rule.fingerprint))


def audit(redaction: Redaction, line: AuditLine) -> AuditLine:
    """Return a line of the audit without secrets."""
    ids = {name: each for name, each in line.subject.items() if isinstance(each, int)}
    return replace(
        line,
        subject={**_hidden(redaction, line.subject), **ids},
        before=_hidden(redaction, line.before),
        after=_hidden(redaction, line.after),
        reason=words(redaction, line.reason),
    )


def _hidden(redaction: Redaction, node: Any) -> Any:  # noqa: ANN401 - any JSON value
    # a value beside its path, as in a patch and in a rule; a filter as a text
    if isinstance(node, list):
        return [_hidden(redaction, each) for each in node]
    if isinstance(node, Number | int | float):
        return HIDDEN if redaction.tells(str(node)) else node
    if isinstance(node, str):
        return redaction.words(node)
    if not isinstance(node, dict):
        return node
    path = node.get("path")
    beside = isinstance(path, str) and bool(secret_in_path(redaction, path) or secret_in_pointer(redaction, path))
    made: dict[str, Any] = {}
    for name, each in node.items():
        if each is not None and (redaction.secret(name) or (beside and name == "value")):
            made[name] = HIDDEN
        elif name == "filter" and isinstance(each, str):
            made[name] = filter_text(redaction, each)
        else:
            made[name] = _hidden(redaction, each)
    return made


def _operations(raw: str) -> Iterator[dict[str, Any]]:
    tree = _tree(raw)
    yield from (each for each in (tree if isinstance(tree, list) else ()) if isinstance(each, dict))


def _tree(raw: str) -> Any:  # noqa: ANN401 - any JSON value
    try:
        return parsed(raw)
    except (ValueError, RecursionError):
        return HIDDEN
