"""What people install: the wheel has every file of the package, and whoever only asks for the version loads little."""

import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "bartleby"
HEAVY = {
    "anyio",
    "fastapi",
    "httpx",
    "jinja2",
    "mcp",
    "mcp_types",
    "pydantic",
    "python_multipart",
    "starlette",
    "uvicorn",
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What is in a wheel that is built now."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        return {name for name in opened.namelist() if not name.endswith("/")}


def test_the_wheel_has_every_file_of_the_package(packed: set[str]) -> None:
    files = {each.relative_to(PACKAGE.parent).as_posix() for each in PACKAGE.rglob("*") if each.is_file()}
    wanted = {each for each in files if "__pycache__" not in each}
    found = {each for each in packed if ".dist-info/" not in each}
    assert found == wanted
    assert "bartleby/py.typed" in found


@pytest.mark.parametrize(
    ("folder", "ending", "least"),
    [
        ("sql", ".sql", 50),
        ("schemas", ".json", 1),
        ("surfaces/web/templates", ".html", 15),
        ("surfaces/web/static", ".js", 5),
        ("surfaces/web/static", ".css", 1),
        ("surfaces/web/static/vendor", ".LICENSE.txt", 2),
    ],
)
def test_what_is_no_python_is_in_it(packed: set[str], folder: str, ending: str, least: int) -> None:
    inside = PurePosixPath("bartleby", folder)
    found = [each for each in packed if PurePosixPath(each).is_relative_to(inside) and each.endswith(ending)]
    assert len(found) >= least


def test_the_licence_is_in_it(packed: set[str]) -> None:
    assert any(each.endswith(".dist-info/licenses/LICENSE") for each in packed)


@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], ["console", "--help"], ["mcp", "--help"], ["dead", "--help"]]
)
def test_nothing_of_the_web_or_of_agents_is_loaded_before_it_is_used(words: list[str]) -> None:
    assert loaded(words) & HEAVY == set()


def loaded(words: Iterable[str]) -> set[str]:
    """Return the packages that a command has loaded when it ends."""
    program = (
        "import sys\nfrom bartleby.surfaces.cli import main\n"
        f"sys.argv = ['bartleby', *{list(words)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print(*{each.partition('.')[0] for each in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())
