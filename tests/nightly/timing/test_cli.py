"""Processor time of the command line."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.demo import Terminal, a_folder


@pytest.fixture
def folder(scratch: Path) -> Iterator[Path]:
    with a_folder(scratch) as path:
        yield path


def test_demo_shows_its_first_line_after_little_work(folder: Path) -> None:
    terminal = Terminal(folder, "--seconds", "6")
    terminal.wait_for("Starting")
    fields = Path(f"/proc/{terminal.process.pid}/stat").read_text().rpartition(")")[2].split()
    assert (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") < 3
    terminal.press_ctrl_c()
