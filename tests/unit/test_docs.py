"""What the pages say exists: links lead somewhere, and the references have every event, option and file."""

import fnmatch
import json
import re
from pathlib import Path

import jsonschema
import pytest

from bartleby.sinks import KINDS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SCHEMA = json.loads((ROOT / "src" / "bartleby" / "schemas" / "event.v1.json").read_text())
ASKED = re.compile(r'options\.(?:text|texts|optional|flag|choice|number|mapping)\("([^"]+)"|option\(options, "([^"]+)"')
EVENTS = (ROOT / "docs" / "reference" / "events.md").read_text()
SINKS = (ROOT / "docs" / "reference" / "sinks.md").read_text()
FILES = {"webhook": ["webhook", "http"], "sentry": ["sentry", "http"], "nats": ["nats", "nats_login"]}


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_type_of_event_is_described() -> None:
    types = [each.removeprefix("io.bartleby.") for each in SCHEMA["properties"]["type"]["enum"]]

    assert [each for each in types if f"`{each}`" not in EVENTS] == []


def test_everything_that_a_letter_tells_is_described() -> None:
    assert [name for name in SCHEMA["$defs"]["letter"]["properties"] if f"`{name}`" not in EVENTS] == []


def test_the_example_of_an_event_is_one() -> None:
    found = re.search(r"```json\n(\{\n.*?)```", EVENTS, re.DOTALL)

    assert found
    jsonschema.validate(json.loads(found[1]), SCHEMA)


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_of_a_sink_is_described(kind: str) -> None:
    folder = ROOT / "src" / "bartleby" / "sinks"
    asked = {
        one or other
        for file in FILES.get(kind, [kind])
        for one, other in ASKED.findall((folder / f"{file}.py").read_text())
    }
    chapter = SINKS[SINKS.index(f"\n## {kind}\n") :].removeprefix("\n").partition("\n## ")[0]

    assert asked
    assert [name for name in sorted(asked) if f"`{name}`" not in chapter] == []


def test_every_target_of_make_and_every_system_package_is_described() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    [targets] = re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    [packages] = re.findall(r"^WANTED := (.+)$", makefile, re.MULTILINE)

    assert [each for each in targets.split() if each != "system" and f"`make {each}`" not in text] == []
    assert [each for each in packages.split() if f"`{each}`" not in text] == []


def test_the_drills_of_buses_are_run_by_chaos_and_by_nobody_else() -> None:
    makefile = (ROOT / "Makefile").read_text()
    runs = dict(re.findall(r"^(\w+): .*\n\t(.*pytest.*)$", makefile, re.MULTILINE))

    assert "tests/chaos/test_bus_*.py" in runs["chaos"]
    assert "--ignore-glob='tests/chaos/test_bus_*.py'" in runs["torture"]


def test_the_map_names_files_that_are_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    package = ROOT / "src" / "bartleby"
    names = set(re.findall(r"`([a-z_]+\.(?:py|sql|json))[`:]", text))
    there = {each.name for each in package.rglob("*") if each.is_file()}

    assert names - there == set()


def test_every_sql_file_is_on_the_map() -> None:
    known = re.findall(r"`([a-z_*]+\.sql)`", (ROOT / "ARCHITECTURE.md").read_text())
    there = [each.name for each in (ROOT / "src" / "bartleby" / "sql").glob("*.sql")]

    assert [each for each in there if not any(fnmatch.fnmatch(each, name) for name in known)] == []
