"""The fingerprint of a failure: the same for the same bug, whatever message, deployment or line number it struck.

It is made of the queue, the types of the exception and of those behind it, the functions of the application they passed
through, and the message without what differs from one failure to the next.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence

_VERSION = "1"
_MOST_FRAMES = 8
_LONGEST_MESSAGE = 500

_NAMES_IN_QUOTES = frozenset({
    "AttributeError", "NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError",
})  # fmt: skip
_SUSPECT = re.compile(r"[\d'\"`@/\\\u201c\u2018\xab]")
_VARIABLE = re.compile(
    r"""
      (?<!\w)'(?:[^'\\]|\\.){0,300}'(?!\w) | "(?:[^"\\]|\\.){0,300}" | `[^`]{0,300}`
    | \u201c[^\u201d]{0,300}\u201d | \u2018[^\u2019]{0,300}\u2019 | \xab[^\xbb]{0,300}\xbb
    | \b[A-Za-z][A-Za-z0-9+.-]{1,20}://[^\s'"<>]{1,400}
    | [\w.+%-]{1,80}@[\w.-]{1,80}
    | \b[A-Za-z]:\\[^\s'",;]{1,300}
    | (?<![\w.*)\]])\.{0,2}~?/[\w.@%+:~=-]{1,100}(?:/[\w.@%+:~=-]{0,100}){0,30}
    | \b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b
    | \b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6},?\ (?=\d|[A-Z][a-z]{2}\ \d)
    | \b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}\.?(?=[ -]\d)
    | [-+$€£]?\w{0,80}\d\w{0,200}
    | \b[0-9a-fA-F]{16,64}\b
    """,
    re.VERBOSE,
)
_RUN = re.compile(r"\*(?:[\s,:;./_+%-]{0,3}(?:and\ |or\ )?\*){1,200}")
_PLURAL = re.compile(r"(?<=\*\ )((?:[\w-]{1,30}\ )?[\w-]{2,30}[^s\W])s\b")
_SQL_NAME = re.compile(
    r'\b(constraint|column|relation|table|function|type|schema|index|sequence|operator|view) "([A-Za-z_][\w.$]{0,126})"'
)
_CODE_NAME = re.compile(r"'([A-Za-z_][\w.]{0,126})'")


def fingerprint(queue: str, links: Iterable[tuple[str, Sequence[str]]], messages: Sequence[str]) -> str:
    """Return the fingerprint of a failure: links are the types with their frames, messages those already normalised."""
    parts = [queue]
    for name, frames in links:
        parts.append(f"! {name}")
        parts.extend(frames)
    parts.extend(messages)
    digest = hashlib.sha256("\n".join(parts).encode(errors="surrogatepass"))
    return f"{_VERSION}:{digest.hexdigest()[:32]}"


def normalised(message: str, error_type: str) -> str:
    """Return the first line of a message without what differs from one failure to the next."""
    line = _first_line(message)
    if not _SUSPECT.search(line):
        return line
    if '"' in line:
        line = _SQL_NAME.sub(r"\1 \2", line)
    if error_type in _NAMES_IN_QUOTES:
        line = _CODE_NAME.sub(r"\1", line)
    line = _VARIABLE.sub("*", line)
    if "* " in line or "*," in line:
        line = _RUN.sub("*", line)
        line = _PLURAL.sub(r"\1", line)
    return line


def path_of(frames: Sequence[str]) -> tuple[str, ...]:
    """Return the frames that tell the way: recursion counts once however deep, and the last ones count."""
    distinct = dict.fromkeys(frames)
    if len(distinct) == len(frames):
        return tuple(frames[-_MOST_FRAMES:])
    return tuple(distinct)[-_MOST_FRAMES:]


def _first_line(message: str) -> str:
    start = message[:_LONGEST_MESSAGE]
    line = start.partition("\n")[0]
    return line.strip() or " ".join(start.split())
