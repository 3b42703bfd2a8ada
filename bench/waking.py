"""What senders pay for waking up idle workers when nobody is idle."""

import os
import re
import shutil
import subprocess
import tempfile
from functools import partial
from pathlib import Path

from bartleby import dev
from bench import ours
from bench.lab import Bar, Findings, Lab, compared, connect, interleaved, script

CLIENTS = (8, 48)
CHECK = (
    "if pg_sequence_last_value(v_queue.idle) > extract(epoch from v_now) * 1000 then\n"
    "    perform bartleby.wake(v_queue);\n  end if;"
)
LONG_AGO = "select setval(idle, 1000) from bartleby.queue"
ALWAYS = "perform pg_notify('bartleby_' || v_queue.id, '');"


def wake(lab: Lab) -> Findings:
    """Sends per second of many clients: as they are, without the check, and with a NOTIFY each."""
    found = Findings()
    pgbench = shutil.which("pgbench", path=dev.find_binaries()) or shutil.which("pgbench")
    if pgbench is None:
        print("wake: left out, there is no pgbench")
        return found
    with lab.database() as dsn:
        ours.Client(dsn).create()
        with connect(dsn) as connection:
            connection.execute(LONG_AGO)  # somebody was idle once, so that every send has something to look at
        original = definition(dsn)
        variants = [original.replace(CHECK, text) for text in (CHECK, "", ALWAYS)]
        for clients in CLIENTS:
            normal, never, always = interleaved(
                lab.scaled(5, 2),
                *(partial(rate, lab, dsn, pgbench, clients, function) for function in variants),
            )
            title = f"send, {clients} clients, nobody idle"
            found.figures += [
                compared(title, "msg/s", (normal, never), "no check", Bar("ratio", least=0.95)),
                compared(title, "msg/s", (normal, always), "always NOTIFY"),
            ]
    return found


def rate(lab: Lab, dsn: str, pgbench: str, clients: int, function: str) -> float:
    with connect(dsn) as connection:
        script(connection, function)
        name = connection.info.dbname
    environment = {**os.environ, **lab.server.environment, "PGDATABASE": name}
    if lab.server.socket_directory is not None:
        environment["PGHOST"] = str(lab.server.socket_directory)
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(f"""select bartleby.send('{ours.QUEUE}', '{{"order": 7, "note": "leave it at the door"}}');\n""")
        file.flush()
        options = ["-n", "-M", "prepared", "-c", str(clients), "-j", "2", "-T", str(lab.scaled(4, 2))]
        command = [pgbench, *options, "-f", str(Path(file.name))]
        said = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    measured = re.search(r"tps = ([0-9.]+)", said.stdout)
    if measured is None:
        raise RuntimeError(f"pgbench said nothing of use:\n{said.stdout}")
    return float(measured[1])


def definition(dsn: str) -> str:
    with connect(dsn) as connection:
        found = connection.execute(
            "select pg_get_functiondef(p.oid) from pg_proc p where p.oid::regproc = 'bartleby.send'::regproc"
        ).fetchone()
    text = str(found[0]) if found else ""
    if CHECK not in text:
        raise RuntimeError("bartleby.send() no longer looks as this benchmark expects")
    return text
