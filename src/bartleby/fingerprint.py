"""The fingerprint of a failure: the same for the same bug, whatever message, deployment or line number it struck.

It is made of the queue, the types of the exception and of those behind it, the functions of the application they passed
through, and the message without what differs from one failure to the next.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence

_VERSION = "1"
_MOST_FRAMES = 8
_LONGEST_MESSAGE = 1000
_LONGEST_NORMALISED = 200

_NAMES_IN_QUOTES = frozenset({
    "AttributeError", "NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError",
})  # fmt: skip
# What differs is in quotes or has one of these in it; most words have not, and are passed over quickly.
_MARKS = r"\d@/\\:_"
_QUOTE = re.compile(r"['\"`\u201c\u2018\xab]")
_QUOTED = re.compile(
    r"""
      '(?<!\w')(?:[^'\\]|\\.){0,1000}'(?!\w) | "(?:[^"\\]|\\.){0,1000}" | `[^`]{0,1000}`
    | \u201c[^\u201d]{0,1000}\u201d | \u2018[^\u2019]{0,1000}\u2019 | \xab[^\xbb]{0,1000}\xbb
    """,
    re.VERBOSE,
)
_OPEN_QUOTE = re.compile(r"(?<!\w)['\"`].*", re.DOTALL)
_MARKED = re.compile(rf"(?<!\S)[^\s{_MARKS}]{{0,200}}[{_MARKS}]\S{{0,500}}")
_VARIABLE = re.compile(
    r"""
      (?<!\w)(?:
        [A-Za-z][A-Za-z0-9+.-]{1,20}://[^<>]{1,500}
      | arn:[^<>]{1,500}
      | [\w.+%-]{1,80}@[\w.-]{1,80}
      | [A-Za-z]:\\[^,;]{1,500}
      | [\w.-]{1,80}(?:/[\w.@%+:~=-]{1,100}){2,30}
      | [0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b
      | (?:[0-9a-fA-F]{1,4}::?){2,7}[0-9a-fA-F]{1,4}\b
      | [a-z]{2,10}_(?=[a-z]{0,40}[A-Z])[A-Za-z]{10,60}\b
      )
    | (?<![\w.*)\]])\.{0,2}~?/[\w.@%+:~=-]{1,100}(?:/[\w.@%+:~=-]{0,100}){0,30}
    | [-+$\u20ac\xa3]?\b\w{0,80}\d\w{0,200}
    """,
    re.VERBOSE,
)
# A random id may have no digit in it; of words so long, hardly one is written with these six letters.
_LETTERS_OF_HEX = re.compile(r"\b(?:[a-f]{8,64}|[A-F]{8,64})\b")
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}[.,]?\ "
_WHEN = re.compile(rf"{_DAY}(?=(?:{_DAY})?\*)")
_RUN = re.compile(r"\*(?:[\s,:;./_+%-]{0,3}(?:and\ |or\ )?\*){1,200}")
_COUNTED = re.compile(r"\*(?:\ [\w-]{1,30}){1,3}")
_PLURAL = re.compile(r"s\b")
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
    start = message[:_LONGEST_MESSAGE]
    line = start.partition("\n")[0].strip() or " ".join(start.split())
    cut = len(line) < len(message) and "\n" not in start
    if _QUOTE.search(line):
        if '"' in line:
            line = _SQL_NAME.sub(r"\1 \2", line)
        if error_type in _NAMES_IN_QUOTES:
            line = _CODE_NAME.sub(r"\1", line)
        line = _QUOTED.sub("*", line)
        if cut:
            line = _OPEN_QUOTE.sub("*", line)
    line = _LETTERS_OF_HEX.sub("*", _MARKED.sub(_without_values, line))
    if "* " in line or "*," in line:
        line = _COUNTED.sub(_singular, _RUN.sub("*", _WHEN.sub("", line)))
    return line[:_LONGEST_NORMALISED]


def path_of(frames: Sequence[str]) -> tuple[str, ...]:
    """Return the frames that tell the way: recursion counts once however deep, and the last ones count."""
    distinct = dict.fromkeys(frames)
    if len(distinct) == len(frames):
        return tuple(frames[-_MOST_FRAMES:])
    return tuple(distinct)[-_MOST_FRAMES:]


def _without_values(word: re.Match[str]) -> str:
    return _VARIABLE.sub("*", word[0])


def _singular(words: re.Match[str]) -> str:
    return _PLURAL.sub("", words[0])
