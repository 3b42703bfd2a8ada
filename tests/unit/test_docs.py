"""Documentation matches the code: links have targets, and references list every event, option and file."""

import fnmatch
import json
import re
from pathlib import Path

import jsonschema

from bartleby.sinks import KINDS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SCHEMA = json.loads((ROOT / "src" / "bartleby" / "schemas" / "event.v1.json").read_text())
READ = re.compile(r'options\.(?:text|texts|optional|flag|choice|number|mapping)\("([^"]+)"|option\(options, "([^"]+)"')
EVENTS = (ROOT / "docs" / "reference" / "events.md").read_text()
SINKS = (ROOT / "docs" / "reference" / "sinks.md").read_text()
FILES = {"webhook": ["webhook", "http"], "sentry": ["sentry", "http"], "nats": ["nats", "nats_login"]}


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings}


def test_links_have_a_target() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
                broken.append((page.name, link))
    assert broken == []


def test_every_event_type_and_field_of_a_letter_is_documented_and_the_example_is_valid() -> None:
    types = [each.removeprefix("io.bartleby.") for each in SCHEMA["properties"]["type"]["enum"]]
    names = [*types, *SCHEMA["$defs"]["letter"]["properties"]]
    assert [each for each in names if f"`{each}`" not in EVENTS] == []
    example, *_ = re.findall(r"```json\n(\{\n.*?)```", EVENTS, re.DOTALL)
    jsonschema.validate(json.loads(example), SCHEMA)


def test_every_option_of_a_sink_is_documented() -> None:
    folder = ROOT / "src" / "bartleby" / "sinks"
    missing = []
    for kind in KINDS:
        sources = [(folder / f"{file}.py").read_text() for file in FILES.get(kind, [kind])]
        read = {one or other for source in sources for one, other in READ.findall(source)}
        assert read, kind
        chapter = SINKS[SINKS.index(f"\n## {kind}\n") :].removeprefix("\n").partition("\n## ")[0]
        missing += [(kind, name) for name in sorted(read) if f"`{name}`" not in chapter]
    assert missing == []


def test_every_make_target_and_system_package_is_documented() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    [targets] = re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    [packages] = re.findall(r"^WANTED := (.+)$", makefile, re.MULTILINE)
    run_by_others = {"system", "plpgsql-check"}
    assert [each for each in targets.split() if each not in run_by_others and f"`make {each}`" not in text] == []
    assert [each for each in packages.split() if f"`{each}`" not in text] == []


def test_architecture_names_existing_files_and_every_sql_file() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    present = {each.name for each in (ROOT / "src" / "bartleby").rglob("*") if each.is_file()}
    assert set(re.findall(r"`([a-z_]+\.(?:py|sql|json))[`:]", text)) - present == set()
    known = re.findall(r"`([a-z_*]+\.sql)`", text)
    files = [each.name for each in (ROOT / "src" / "bartleby" / "sql").glob("*.sql")]
    assert [each for each in files if not any(fnmatch.fnmatch(each, name) for name in known)] == []
