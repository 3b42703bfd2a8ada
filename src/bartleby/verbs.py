"""What every client can do. Each verb is written once, in calls.py and its neighbours; here it becomes a method."""

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Generic, ParamSpec, TypeVar, get_args, overload

from bartleby import attendance, calls, credentials, emitting, grouping, inspection, operating, plans, triage
from bartleby.calls import Call

P = ParamSpec("P")
T = TypeVar("T")


class Verb(Generic[P, T]):
    """A call as a method: of a Client it returns the answer, of an AsyncClient it is awaited."""

    def __init__(self, make: Callable[P, Call[T]]) -> None:
        self._make = make
        signature = inspect.signature(make)
        answer: Any = get_args(signature.return_annotation)[0]
        self._signature = signature.replace(return_annotation=answer)
        self._async_signature = signature.replace(return_annotation=Coroutine[Any, Any, answer])

    @overload
    def __get__(self, runner: None, owner: type) -> Callable[P, Call[T]]: ...
    @overload
    def __get__(self, runner: "SyncVerbs", owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, runner: "AsyncVerbs", owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, runner: "SyncVerbs | AsyncVerbs | None", owner: type) -> object:
        if runner is None:
            return self._make

        @functools.wraps(self._make)
        def method(*args: P.args, **kwargs: P.kwargs) -> T | Coroutine[Any, Any, T]:
            return runner.run(self._make(*args, **kwargs))

        signature = self._signature if isinstance(runner, SyncVerbs) else self._async_signature
        method.__signature__ = signature  # type: ignore[attr-defined] # for help() and editors
        return method


class Verbs:
    """What every client can do."""

    send = Verb(calls.send)
    send_many = Verb(calls.send_many)
    claim = Verb(calls.claim)
    start = Verb(calls.start)
    extend = Verb(calls.extend)
    ack = Verb(calls.ack)
    fail = Verb(calls.fail)
    reject = Verb(calls.reject)
    release = Verb(calls.release)
    idle = Verb(calls.idle)
    channel = Verb(calls.channel)
    give_back = Verb(attendance.give_back)
    reap = Verb(calls.reap)
    turn = Verb(calls.turn)
    lease_length = Verb(calls.lease_length)
    outlook = Verb(calls.outlook)
    open_breaker = Verb(calls.open_breaker)
    mark_handled = Verb(calls.mark_handled)
    handled_keys = Verb(calls.handled_keys)
    take_duty = Verb(calls.take_duty)
    leave_duty = Verb(calls.leave_duty)
    prune = Verb(calls.prune)
    watch = Verb(calls.watch)
    create_queue = Verb(operating.create_queue)
    attach_pgmq = Verb(operating.attach_pgmq)
    configure_queue = Verb(operating.configure_queue)
    drop_queue = Verb(operating.drop_queue)
    pause_queue = Verb(operating.pause_queue)
    resume_queue = Verb(operating.resume_queue)
    close_breaker = Verb(operating.close_breaker)
    force_breaker = Verb(operating.force_breaker)
    queues = Verb(operating.queues)
    attempts = Verb(operating.attempts)
    find_message = Verb(operating.find_message)
    last_message_id = Verb(operating.last_message_id)
    audit_log = Verb(operating.audit_log)
    verify_audit = Verb(operating.verify_audit)
    audit_anchor = Verb(operating.audit_anchor)
    dead_letters = Verb(triage.dead_letters)
    dead_letter = Verb(triage.dead_letter)
    count_letters = Verb(triage.count_letters)
    letter_ids = Verb(triage.letter_ids)
    fates = Verb(triage.fates)
    discard = Verb(triage.discard)
    restore = Verb(triage.restore)
    hold = Verb(triage.hold)
    erase_key = Verb(triage.erase_key)
    replay = Verb(triage.replay)
    groups = Verb(grouping.groups)
    group = Verb(grouping.group)
    shared_values = Verb(grouping.shared_values)
    acknowledge_group = Verb(grouping.acknowledge_group)
    mute_group = Verb(grouping.mute_group)
    resolve_group = Verb(grouping.resolve_group)
    reopen_group = Verb(grouping.reopen_group)
    merge_groups = Verb(grouping.merge_groups)
    split_group = Verb(grouping.split_group)
    group_rules = Verb(grouping.group_rules)
    remove_rule = Verb(grouping.remove_rule)
    regroup = Verb(grouping.regroup)
    tally = Verb(grouping.tally)
    plan_replay = Verb(plans.plan_replay)
    drop_preview = Verb(plans.drop_preview)
    start_replay = Verb(plans.start_replay)
    pause_replay = Verb(plans.pause_replay)
    resume_replay = Verb(plans.resume_replay)
    cancel_replay = Verb(plans.cancel_replay)
    approve_replay = Verb(plans.approve_replay)
    exclude_items = Verb(plans.exclude_items)
    advance_replays = Verb(plans.advance_replays)
    replays = Verb(plans.replays)
    find_replay = Verb(plans.find_replay)
    replay_items = Verb(plans.replay_items)
    replay_change = Verb(plans.replay_change)
    replay_changes = Verb(plans.replay_changes)
    replay_shares = Verb(plans.replay_shares)
    replay_obstacles = Verb(plans.replay_obstacles)
    replay_relapses = Verb(plans.replay_relapses)
    sinks = Verb(emitting.sinks)
    put_sink = Verb(emitting.put_sink)
    pause_sink = Verb(emitting.pause_sink)
    resume_sink = Verb(emitting.resume_sink)
    remove_sink = Verb(emitting.remove_sink)
    sink_settings = Verb(emitting.sink_settings)
    cloud_events = Verb(emitting.cloud_events)
    report_sink = Verb(emitting.report_sink)
    refuse_events = Verb(emitting.refuse_events)
    emitted = Verb(emitting.emitted)
    emit_again = Verb(emitting.emit_again)
    tokens = Verb(credentials.tokens)
    find_token = Verb(credentials.find_token)
    find_password = Verb(credentials.find_password)
    add_token = Verb(credentials.add_token)
    revoke_token = Verb(credentials.revoke_token)
    open_session = Verb(credentials.open_session)
    close_session = Verb(credentials.close_session)
    note = Verb(credentials.note)
    take_answer = Verb(credentials.take_answer)
    keep_answer = Verb(credentials.keep_answer)
    workers = Verb(attendance.workers)
    report_worker = Verb(attendance.report_worker)
    leave_worker = Verb(attendance.leave_worker)
    drain_worker = Verb(attendance.drain_worker)
    version = Verb(inspection.version)
    drift = Verb(inspection.drift)
    facts = Verb(inspection.facts)
    server_is_young = Verb(inspection.server_is_young)
    server_trouble = Verb(inspection.server_trouble)
    cost_of_queues = Verb(inspection.cost_of_queues)
    oldest_xmin_holder = Verb(inspection.oldest_xmin_holder)
    segments = Verb(inspection.segments)
    expiring = Verb(inspection.expiring)
    group_versions = Verb(inspection.group_versions)
    group_replays = Verb(inspection.group_replays)
    restless_groups = Verb(inspection.restless_groups)
    message_replays = Verb(inspection.message_replays)
    message_deeds = Verb(inspection.message_deeds)
    on_duty = Verb(inspection.on_duty)


class SyncVerbs(Verbs):
    """Verbs that return their answers."""

    def run(self, call: Call[T]) -> T:
        """Run one call."""
        raise NotImplementedError


class AsyncVerbs(Verbs):
    """Verbs that are awaited."""

    async def run(self, call: Call[T]) -> T:
        """Run one call."""
        raise NotImplementedError
