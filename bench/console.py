"""Five million dead letters in the console: how long pages and deeds take, how much they weigh, and who listens."""

import itertools
import os
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from bench import streams
from bench.lab import Bar, Figure, Findings, Lab, connect, rows, run, script
from bench.letters import DAYS, GROUPS, QUEUES, SKEWED, Cemetery, bury
from bench.site import Answer, Site, Times, served

PAGE, DEED = 300, 100
# Nothing is promised of what no index knows: it is looked for until two seconds are over, then a link goes on; nor of
# counts of such in the API, one by one up to ten thousand. Pages count up to one thousand.
UNBARRED = frozenset({
    "page: Letters by words that one in a thousand has",
    "api: dead letters by words that one in a thousand has",
    "api: count by a common payload value",
})  # fmt: skip
WEIGHT = 200
WEIGHED = (
    "/", "/groups", "/groups/1", "/letters", "/letters/7", "/operations", "/operations/1", "/queues",
    "/queues/letters-0", "/workers", "/sinks", "/audit", "/doctor",
)  # fmt: skip
PLANNED = 100_000
LARGEST, SMALL = 1, GROUPS

HOURS = """
insert into bartleby.group_hour (group_id, hour, deaths, last_at)
select d.group_id, date_trunc('hour', d.dead_at, 'UTC'), count(*), max(d.dead_at)
from bartleby.dead_letter d group by 1, 2
"""
OFFICE = """
select bartleby.put_sink('bus-' || n, 'log', '{}', 'bench', 'measured') from generate_series(1, 3) n;
select bartleby.report_worker('host-' || n, 'worker', '2.' || n % 5, array['letters-' || n % 20], 'host', n, 16, n % 16)
from generate_series(1, 40) n;
select bartleby.note('session.open', jsonb_build_object('n', n), 'ana') from generate_series(1, 2000) n
"""
SOME = "select message_id from bartleby.dead_letter where status = 'dead' and group_id = %s::bigint limit %s::bigint"

Asked = dict[str, Callable[[], Answer]]


def console(lab: Lab) -> Findings:
    """Pages, deeds and the API with letters of 400 bugs, one of which has a fifth of them."""
    with lab.database() as dsn:
        yard = Cemetery(dsn, connect(dsn), lab.scaled(5_000_000, 200_000))
        begin = time.monotonic()
        furnish(yard)
        print(f"  {yard.letters:,} letters in {time.monotonic() - begin:.0f} s", flush=True)
        found = visited(yard, seconds=lab.scaled(60, 10))
        yard.connection.close()
    return found


def furnish(yard: Cemetery) -> None:
    """Bury the letters, and have people, sinks, workers and a plan that runs."""
    bury(yard, SKEWED)
    for statement in (HOURS, OFFICE, "analyze"):
        script(yard.connection, statement)
    plan = rows(
        yard.connection,
        "select bartleby.plan_replay(null, 'bench', 'measured', %s::bigint[])",
        [row[0] for row in rows(yard.connection, SOME, LARGEST, min(PLANNED, yard.letters // 50))],
    )
    run(yard.connection, "select bartleby.start_replay(%s::bigint, 'bench', 'measured')", plan[0][0])
    run(yard.connection, "select count(*) from bartleby.advance_replays(5000)")


def visited(yard: Cemetery, *, seconds: int) -> Findings:
    """Measure a console on such a database."""
    found = Findings()
    load = os.getloadavg()
    with served(yard.dsn) as site:
        wants = {"page": pages(site, yard), "deed": deeds(site, yard), "api": programs(site, yard)}
        for kind, asked in wants.items():
            for name, action in asked.items():
                times = site.timed(20, action)
                report(found, f"{kind}: {name}", times, DEED if kind == "deed" else PAGE)
        for path in WEIGHED:
            whole, kept = site.weight(path)
            found.figures += [
                Figure(f"weight of {path}, first visit", "kB", whole / 1000, bar=Bar("value", most=WEIGHT)),
                Figure(f"weight of {path}, warm cache", "kB", kept / 1000, bar=Bar("value", most=WEIGHT)),
            ]
        found.figures += streams.held(yard, site, seconds)
    found.series["load average, before and after"] = [load[0], os.getloadavg()[0]]
    return found


def report(found: Findings, name: str, times: Times, most: float) -> None:
    """Keep a measurement, and print it: the whole takes a while."""
    told = f"first {times.first:.0f}, p50 {times.middle:.0f}, p95 {times.tail:.0f} ms, work {times.work:.0f} ms"
    print(f"  {name}: {told}", flush=True)
    bar = None if name in UNBARRED else Bar("value", most=most)
    found.figures.append(Figure(f"{name}, p95", "ms", times.tail, bar=bar))
    found.series[f"{name}: first, p50, p95, work"] = [times.first, times.middle, times.tail, times.work]


def pages(site: Site, yard: Cemetery) -> Asked:
    """Every page, the lists with values that differ from one request to the next."""
    dice = random.Random(7)

    def get(path: str) -> Callable[[], Answer]:
        return lambda: site.ask(path)

    def letters(**given: Callable[[], object]) -> Callable[[], Answer]:
        return lambda: site.ask(f"/letters?{urlencode({name: make() for name, make in given.items()})}")

    def far() -> str:
        return place(yard, dice.randrange(yard.letters))

    lists = {name: letters(filter=make) for name, make in filters(yard, dice).items()}
    return {
        "Now": get("/"),
        "Groups": get("/groups"),
        "Groups of a queue, newest first": get("/groups?queue=letters-3&sort=last"),
        "Group, the largest": get(f"/groups/{LARGEST}"),
        "Group, a small one": get(f"/groups/{SMALL}"),
        "Letters": get("/letters"),
        **{f"Letters by {name}": action for name, action in lists.items()},
        "Letters, a page far down": letters(after=far),
        "Letters, oldest first": get("/letters?sort=oldest"),
        "Letters, by id": get("/letters?sort=-id"),
        "Letters of a queue, by id": get("/letters?filter=queue%3Aletters-3&sort=id"),
        "Letter": lambda: site.ask(f"/letters/{dice.randrange(1, yard.letters)}"),
        "Operations": get("/operations"),
        "Operation that runs": get("/operations/1"),
        "Queues": get("/queues"),
        "Queue": lambda: site.ask(f"/queues/letters-{dice.randrange(QUEUES)}"),
        "Workers": get("/workers"),
        "Sinks": get("/sinks"),
        "Audit": get("/audit"),
        "Doctor": get("/doctor"),
    }


def filters(yard: Cemetery, dice: random.Random) -> dict[str, Callable[[], str]]:
    """What people look for."""
    return {
        "queue": lambda: f"queue:letters-{dice.randrange(QUEUES)}",
        "key": lambda: f"key:order-{dice.randrange(yard.letters)}",
        "type": lambda: f"type:{dice.choice(['CardDeclined', 'Timeout', 'NoStock'])}{dice.randrange(4)}",
        "time": lambda: f"age:>{dice.randrange(1, DAYS * 24)}h",
        "queue and time": lambda: f"queue:letters-{dice.randrange(QUEUES)} age:>{dice.randrange(1, 20)}d age:<{DAYS}d",
        "a rare payload value": lambda: f"payload.customer.id:{dice.randrange(1_000_003)}",
        "a common payload value": lambda: f"payload.customer.country:{dice.choice(['DE', 'FR', 'JP'])}",
        "words that many have": lambda: 'error:"was declined"',
        "words that one in a thousand has": lambda: f'error:"after {dice.randrange(977)} ms"',
        "status": lambda: f"status:{dice.choice(['discarded', 'resolved', 'replayed', 'any'])}",
    }


def place(yard: Cemetery, number: int) -> str:
    """The cursor of a letter."""
    found = rows(
        yard.connection,
        "select bartleby.cursor_text('newest', status_at, message_id) from bartleby.dead_letter"
        " where message_id >= %s::bigint and status = 'dead' order by message_id limit 1",
        number,
    )
    return str(found[0][0])


def deeds(site: Site, yard: Cemetery) -> Asked:
    """What pages ask for while somebody looks, and what somebody does: until the page that it leads to is there."""
    dead = itertools.cycle(row[0] for row in rows(yard.connection, SOME, SMALL - 1, 100))
    why = {"reason": "measured"}

    def since() -> str:
        return (datetime.now(UTC) - timedelta(minutes=10)).isoformat()

    def planned() -> Answer:
        made = site.do("/operations", {"filter": f"group:{SMALL}", **why})
        newest = rows(yard.connection, "select max(id) from bartleby.replays")[0][0]
        site.ask(f"/operations/{newest}/cancel", why)
        return made

    discarding, undoing = there_and_back(
        lambda: site.do(f"/letters/{next(dead)}/discard", why),
        lambda done: site.do("/undo", {"request_id": done.headers["x-request-id"]}),
    )
    return {
        "new groups": lambda: site.ask(f"/groups/new?seen={GROUPS - 1}"),
        "new letters": lambda: site.ask(f"/letters/new?{urlencode({'since': since()})}"),
        "new letters of a search": lambda: site.ask(
            f"/letters/new?{urlencode({'since': since(), 'filter': 'payload.customer.country:DE'})}"
        ),
        "words for a filter": lambda: site.ask("/letters/words?filter=queue%3Aletters-3"),
        "chart of a queue": lambda: site.ask("/live/history?queue=letters-0"),
        "verdict of Now": lambda: site.ask("/"),
        "a letter that is watched": lambda: site.ask("/letters/7"),
        "a plan that is watched": lambda: site.ask("/operations/1"),
        "preview of a plan of a small group": planned,
        "discard a letter": discarding,
        "undo it": undoing,
        "replay a letter": lambda: site.do(f"/letters/{next(dead)}/replay", why),
        "what a discard by filter would do": lambda: site.do(
            "/letters/confirm", {"deed": "discard", "filter": f"group:{SMALL}"}
        ),
        "pause a queue": lambda: site.do("/queues/letters-5/pause", why),
        "resume it": lambda: site.do("/queues/letters-5/resume", why),
        "acknowledge a group": lambda: site.do(f"/groups/{SMALL}/acknowledge", why),
        "reopen it": lambda: site.do(f"/groups/{SMALL}/reopen", why),
    }


def there_and_back(
    there: Callable[[], Answer], back: Callable[[Answer], Answer]
) -> tuple[Callable[[], Answer], Callable[[], Answer]]:
    """A deed and what takes it back, each of which can be measured alone."""

    def undone() -> Answer:
        return back(there())

    return there, undone


def programs(site: Site, yard: Cemetery) -> Asked:
    """The same lists for programs."""
    dice = random.Random(11)

    def get(path: str) -> Callable[[], Answer]:
        return lambda: site.ask(f"/api/v1{path}")

    def letters(path: str, make: Callable[[], str]) -> Callable[[], Answer]:
        return lambda: site.ask(f"/api/v1/dead-letters{path}?{urlencode({'filter': make()})}")

    wanted = filters(yard, dice)
    return {
        "dead letters": get("/dead-letters"),
        **{f"dead letters by {name}": letters("", make) for name, make in wanted.items()},
        **{f"count by {name}": letters("/count", make) for name, make in wanted.items()},
        "dead letter": lambda: site.ask(f"/api/v1/dead-letters/{dice.randrange(1, yard.letters)}"),
        "groups": get("/groups"),
        "group": get(f"/groups/{LARGEST}"),
        "all about a group": get(f"/groups/{LARGEST}/portrait"),
        "replays": get("/replays"),
        "items of a replay": get("/replays/1/items"),
        "queues": get("/queues"),
        "workers": get("/workers"),
        "sinks": get("/sinks"),
        "audit": get("/audit"),
        "overview": get("/overview"),
        "metrics": lambda: site.ask("/metrics"),
    }
