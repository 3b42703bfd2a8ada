"""The way an exception took through the code: the application's frames are kept, those of libraries are counted.

What a way looks like is made once and remembered by the code objects and line numbers on it, for making it costs ten
times as much as everything else about a failure.
"""

import linecache
import os
import re
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import CodeType, TracebackType

from bartleby.fingerprint import path_of
from bartleby.message import storable
from bartleby.redaction import Redactor

_FIRST, _LAST = 40, 60
_LAST_LIBRARY = 2
_FALLBACK = 3
_LINE_LIMIT = 300
_LONGEST_NAME = 200
_MOST_REMEMBERED = 5_000
_LARGEST_SOURCE = 10 << 20

_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_OWN = os.path.join(os.path.dirname(os.path.realpath(__file__)), "")  # noqa: PTH118, PTH120 - compared as text
_STANDARD = tuple({
    os.path.join(folder, "")  # noqa: PTH118 - compared as text
    for name in ("stdlib", "platstdlib")
    for folder in (sysconfig.get_path(name), os.path.realpath(sysconfig.get_path(name)))
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trace:
    """What a traceback looks like, and the names on its way."""

    text: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Frame:
    code: CodeType
    line: int | None
    module: str
    own: bool
    application: bool

    @property
    def name(self) -> str:
        return f"{self.module}:{self.code.co_qualname[:_LONGEST_NAME]}"


_NOWHERE = Trace("", ())


class Tracer:
    """Reads tracebacks."""

    def __init__(self, redactor: Redactor, application: Sequence[str] = ()) -> None:
        self._redactor = redactor
        # Bartleby as a whole is never the application; a module of it that has handlers may be.
        self._application = tuple({name for name in application if name != "bartleby"})
        # The codes are kept beside what was made of them, so that their ids stay theirs.
        self._known: dict[tuple[int | None, ...], tuple[Trace, list[CodeType]]] = {}

    def trace(self, traceback: TracebackType | None) -> Trace:
        """Return what a traceback looks like."""
        if traceback is None:
            return _NOWHERE
        steps, left_out = _steps(traceback)
        key: list[int | None] = [left_out]
        codes: list[CodeType] = []
        for step in steps:
            code = step.tb_frame.f_code
            codes.append(code)
            key.append(id(code))
            key.append(step.tb_lineno)
        known = self._known.get(tuple(key))
        if known is None:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            known = self._known[tuple(key)] = (self._made(steps, left_out), codes)
        return known[0]

    def _made(self, steps: list[TracebackType], left_out: int) -> Trace:
        frames = [self._frame(step) for step in steps]
        kept = [frame.application for frame in frames]
        kept_by_right = any(kept)
        foreign = [place for place, frame in enumerate(frames) if not frame.own]
        # Where it was raised is always shown, whoever's code it is.
        for place in foreign[-_LAST_LIBRARY:] if kept_by_right else foreign[-_FALLBACK:]:
            kept[place] = True
        if not any(kept):
            kept[-_FALLBACK:] = [True] * len(kept[-_FALLBACK:])
        lines = ["Traceback (most recent call last):\n"]
        for place, group in _runs(frames, kept):
            if left_out and place == _FIRST:
                lines.append(f"  … {left_out:,} frames left out …\n")
            lines.extend(self._shown(group) if kept[place] else [_folded(group)])
        telling = [frame for frame in frames if frame.application] or [frame for frame in frames if not frame.own]
        names = [frame.name for frame in telling or frames]
        return Trace("".join(lines), path_of(names if kept_by_right else names[-_FALLBACK:]))

    def _frame(self, step: TracebackType) -> _Frame:
        code = step.tb_frame.f_code
        file = code.co_filename
        name = step.tb_frame.f_globals.get("__name__")
        module = str.__str__(name) if isinstance(name, str) else os.path.splitext(os.path.basename(file))[0]  # noqa: PTH119, PTH122 - a file name need not be a path
        own = file.startswith(_OWN)
        installed = own or file.startswith(("<frozen ", *_STANDARD)) or _INSTALLED.search(file) is not None
        application = not installed or any(f"{module}.".startswith(f"{name}.") for name in self._application)
        return _Frame(code, step.tb_lineno, module[:_LONGEST_NAME], own, application)

    def _shown(self, group: list[_Frame]) -> Iterator[str]:
        for _, same in groupby(group, key=lambda frame: (id(frame.code), frame.line)):
            repeated = list(same)
            yield self._rendered(repeated[0])
            if len(repeated) > 1:
                yield f"  … and {len(repeated) - 1} times more\n"

    def _rendered(self, frame: _Frame) -> str:
        file = storable(frame.code.co_filename[-_LINE_LIMIT:])
        name = storable(frame.code.co_qualname[:_LINE_LIMIT])
        source = self._redactor.clean(_source(frame.code.co_filename, frame.line), _LINE_LIMIT)
        where = f'  File "{file}", line {frame.line}, in {name}\n'
        return f"{where}    {source}\n" if source else where


def _steps(traceback: TracebackType) -> tuple[list[TracebackType], int]:
    steps = []
    step: TracebackType | None = traceback
    while step is not None:
        steps.append(step)
        step = step.tb_next
    left_out = max(len(steps) - _FIRST - _LAST, 0)
    return (steps[:_FIRST] + steps[-_LAST:], left_out) if left_out else (steps, 0)


def _runs(frames: list[_Frame], kept: list[bool]) -> Iterator[tuple[int, list[_Frame]]]:
    # Neighbours of one kind, from where to where; never across the place where frames were left out.
    start = 0
    for place in range(1, len(frames) + 1):
        if place in {len(frames), _FIRST} or kept[place] != kept[start]:
            yield start, frames[start:place]
            start = place


def _folded(group: list[_Frame]) -> str:
    packages = dict.fromkeys(storable(frame.module.partition(".")[0]) for frame in group)
    frames = "frame" if len(group) == 1 else "frames"
    return f"  … {len(group)} {frames} of {', '.join(packages)}\n"


def _source(file: str, line: int | None) -> str:
    try:
        if file not in linecache.cache:
            facts = os.stat(file)  # noqa: PTH116 - a file name need not be a path
            # A code object may bear any file name, and /dev/zero has no end.
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > _LARGEST_SOURCE:
                return ""
        return linecache.getline(file, line or 0).strip()
    except (OSError, ValueError):
        return ""
