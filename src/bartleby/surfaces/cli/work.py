"""`bartleby work`: run the handlers of an application."""

import asyncio
import contextlib
import importlib
import itertools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click
import psycopg

from bartleby.errors import BartlebyError, NoApp
from bartleby.surfaces.cli.connecting import client, database, patient_client

if TYPE_CHECKING:
    from bartleby.app import Bartleby
    from bartleby.client import Client
    from bartleby.surfaces.cli.status import StatusLine
    from bartleby.worker import Worker

_CHILD = "BARTLEBY_WORKER_CHILD"
_NOW = 2
_LAST_MOMENTS = 10.0


@click.command()
@click.argument("app", metavar="MODULE:APP")
@click.option("--queue", "queues", multiple=True, help="Only this queue; may be given several times.")
@click.option(
    "--pgmq",
    "attached",
    multiple=True,
    metavar="QUEUE",
    help="Only this queue, one of pgmq: it is attached first if it is not. May be given several times.",
)
@click.option(
    "--pgmq-max-attempts",
    type=click.IntRange(1, 32_000),
    envvar="BARTLEBY_PGMQ_MAX_ATTEMPTS",
    help="How often a message of these is tried; BARTLEBY_PGMQ_MAX_ATTEMPTS if not given. A new one has 5.",
)
@click.option(
    "--concurrency", type=click.IntRange(1, 10_000), help="Messages of a queue at once, where its handler names none."
)
@click.option("--processes", type=click.IntRange(1, 256), default=1, show_default=True, help="For more cores.")
@click.option("--until-idle", is_flag=True, help="End when nothing is ready, running, or due within a minute.")
@click.option(
    "--grace", type=click.FloatRange(min=0), default=30.0, show_default=True, help="Seconds to finish after SIGTERM."
)
@click.option(
    "--poll",
    type=click.FloatRange(min=0.01),
    default=1.0,
    show_default=True,
    help="Seconds between looks where nothing can be heard.",
)
@click.option("--log", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--quiet", is_flag=True, help="Warnings only.")
@click.pass_obj
def work(  # noqa: PLR0917 - click passes them by name
    dsn: str | None,
    app: str,
    queues: tuple[str, ...],
    attached: tuple[str, ...],
    pgmq_max_attempts: int | None,
    concurrency: int | None,
    processes: int,
    until_idle: bool,
    grace: float,
    poll: float,
    log: str,
    quiet: bool,
) -> None:
    """Run the handlers of an application.

    MODULE:APP names it: shop:app is `app = Bartleby()` in shop.py. SIGTERM, or Ctrl-C, lets the running handlers
    finish; a second one does not. A database that is away is waited for, unless it is to end when it is idle.
    """
    from bartleby import telemetry
    from bartleby.surfaces.cli.status import StatusLine
    from bartleby.worker import Worker

    for each in (signal.SIGTERM, signal.SIGINT):  # a stop before there is anything to stop
        signal.signal(each, lambda *_: sys.exit(0))
    alone = processes == 1 and _CHILD not in os.environ
    status = StatusLine() if alone and not quiet and log == "text" and sys.stderr.isatty() else None
    telemetry.configure(as_json=log == "json", level=logging.WARNING if quiet else logging.INFO, handler=status)
    application = load(app)
    queues += attached
    application.handlers_for(queues or None)
    with database(dsn or application.configured.dsn) as found:
        with client(found) if until_idle else patient_client(found) as opened:
            _attach(opened, attached, pgmq_max_attempts)
        if processes > 1 and _CHILD not in os.environ:
            from bartleby.supervisor import Supervisor, command_of_this

            environment = {**os.environ, "BARTLEBY_DSN": found, _CHILD: str(os.getpid())}
            sys.exit(Supervisor(command_of_this(), environment, processes, grace).run())
        application.connect_to(found)
        worker = Worker(
            application, queues=queues or None, concurrency=concurrency, until_idle=until_idle, grace=grace, poll=poll
        )
        stuck = _run(_work(worker, status))
    if stuck:
        # a handler that will not end; the interpreter would wait for it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _attach(opened: "Client", queues: tuple[str, ...], max_attempts: int | None) -> None:
    policy = {} if max_attempts is None else {"max_attempts": max_attempts}
    for queue in queues:
        try:
            opened.attach_pgmq(queue, policy)
        except psycopg.errors.InsufficientPrivilege:
            opened.lease_length(queue)  # a worker may not, and an operator has: or there is no such queue


def _run(main: Coroutine[Any, Any, None]) -> bool:
    # asyncio.run() waits for ever for a task that ignores its cancellation
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            _, left = loop.run_until_complete(asyncio.wait(left, timeout=1))
        if not left:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
    return bool(left)


async def _work(worker: "Worker", status: "StatusLine | None") -> None:
    _obey_signals(worker)
    beside = [asyncio.create_task(_orphaned(worker))]
    with contextlib.nullcontext() if status is None else status.above():
        if status is not None:
            beside.append(asyncio.create_task(status.follow(worker)))
        try:
            await worker.run()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)


def _obey_signals(worker: "Worker") -> None:
    loop, asked = asyncio.get_running_loop(), itertools.count(1)
    # A handler that blocks the loop, or has no end, must not keep the process from ending: what it holds then lapses
    # by itself. The thread is there beforehand, for in a signal handler none can be started safely.
    reader, writer = os.pipe()
    threading.Thread(target=_end_soon_after, args=(reader,), daemon=True).start()

    def obey(*_: object) -> None:
        # not the loop's own way, which a handler that blocks the loop keeps from us
        if next(asked) == _NOW:
            os.write(writer, b"!")
        loop.call_soon_threadsafe(worker.stop)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, obey)


def _end_soon_after(reader: int) -> None:
    os.read(reader, 1)
    time.sleep(_LAST_MOMENTS)
    os._exit(1)


async def _orphaned(worker: "Worker") -> None:
    # a supervisor that was killed can neither stop this process nor start it again
    while _CHILD in os.environ:
        await asyncio.sleep(1)
        if os.getppid() != int(os.environ[_CHILD]):
            worker.stop()
            return


def load(path: str) -> "Bartleby":
    """Return the application that MODULE:APP names."""
    from bartleby.app import Bartleby

    module_name, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise NoApp(f"{path!r} does not name an application", hint="MODULE:APP, such as shop:app")
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109 - as sys.path spells it
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as sys.path spells it
    module = _imported(module_name)
    found = {name: value for name, value in vars(module).items() if isinstance(value, Bartleby)}
    if not attribute and len(found) == 1:
        return next(iter(found.values()))
    value = vars(module).get(attribute)
    if isinstance(value, Bartleby):
        return value
    names = ", ".join(f"{module_name}:{name}" for name in found)
    problem = f"{module_name} has no application {attribute!r}" if attribute else f"which application in {module_name}?"
    raise NoApp(problem, hint=f"there is: {names}" if names else f"put `app = Bartleby()` into {module.__file__}")


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            hint = (
                "MODULE:APP, such as shop:app for `app = Bartleby()` in shop.py; run this in the directory of shop.py"
            )
            raise NoApp(f"there is no module {name!r}", hint=hint) from None
        _show(error)
        raise NoApp(f"{name} cannot be imported: {error}", hint="install it into the same environment") from None
    except BartlebyError:
        raise  # says it all: a handler that cannot be one
    except Exception as error:  # noqa: BLE001 - it is the user's, whatever it is
        _show(error)
        raise NoApp(f"{name} cannot be imported: {type(error).__name__}: {error}") from None


def _show(error: Exception) -> None:
    # from the first line of the user's own: how we got there is no news
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and _ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    click.echo("".join(traceback.format_exception(error.with_traceback(trace))), err=True, nl=False)


def _ours(file: str) -> bool:
    return file.startswith("<frozen") or file in {__file__, importlib.__file__}
