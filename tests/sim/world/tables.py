"""Contents of a process's tables: dicts, lists, sets and queues in attributes of objects of our packages.

Each entry that outlives a request, a link or a session has an owner that removes it on every path. So when the cluster
is quiet, a table is empty, or `KEPT` lists it with a reason. A new table that is not empty needs a reason there: the
code that removes its entries, or their bound.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

_PACKAGES = ("gateway.", "scheduler_svc.", "worker_svc.", "quire.")
_TABLES = (dict, list, set, deque)

KEPT: dict[str, str] = {
    "what a process has for its life, or for the life of its model": """
        AdapterSlots._of_adapter AdapterSlots._slots Adapters._served ApiRoute.methods ApiRoute.param_convertors
        ApiRoute.statuses Front.call_readers Front.handlers Front.routes Front.servicers Front.tasks
        FrontContext.opened GatewayMetrics._models
        Gateway._background Gateway._fronts KeyEntry.__dict__
        KeyEntry.__pydantic_fields_set__ KeyRing._callers KeyRing._signatures _Entries.by_hash _Entries.by_id
        RowTable._free RowTable.sequences ServedModel.tokenizer_config TokenTexts._anchor TokenTexts._bytes
        Tokenizer._silent Tokenizer.special_tokens""",
    "one entry for each replica or gateway that is known": """
        CacheFeed._watchers Members._fixed Members.links Offers._links ReplicaRecords._places ReplicaRecords._records
        Replicas._replicas Replicas.links Requests._connections
        SchedulerCalls._links""",
    "a counter for each of few kinds": """
        CallCounts._counts DraftCounts.right_at HttpAnswers.counts HttpAnswers.durations ReplicaRecord.finished
        Reservations._by_kind Reservations.holders""",
    "one entry for each block, and what is cached in it": """
        BlockFile._free BlockFile._slots CacheLog.unread CachedBlocks._blocks CachedBlocks._on_disk
        CachedTokens.token_ids PrefixIndex._by_hash PrefixIndex._cached PrefixIndex._changes PrefixIndex._found
        PrefixIndex._free PrefixIndex._hashes PrefixIndex._ref_counts RecordedScheduler.restored
        Tier._by_slot Tier._slots""",
    "the block that stands for blocks that no layer reads": """
        Windows.blanks BlockManager._unread""",
    "as many as a bound says, the oldest go; or they go with the next that comes": """
        ConstraintChecker._kept DurableRoom._charge_running DurableRoom._num_running DurableRoom._over
        EndedRequests.cancelled
        FairPolicy._entries FairPolicy._heap FairPolicy._held FairPolicy.counters Earliest._heap LastParameters.asked
        Preparations._compiled PromptLogprobsRouter._reporting RetryAdvisor._ends
        Served._first_tokens StepDraft._release Trials._need_losses""",
    "until the other side has taken it, or is gone": """
        Outbox._sent SchedulerLink._outbox""",
    "clients of HTTP keep their connections": """
        HttpConnection.connections HttpConnection.headers HttpConnection.scope HttpServer._holders""",
    "durable requests, until their time is over; pins likewise": """
        Connection.reads Delivery.readers Earliest._places Pins._by_key Pins._of_tenant Pins._pins
        Requests._by_handle Requests._by_id Reservation.blocks""",
    "what a worker is late with": """
        PendingOrders._sent_at Preparations._late Preparations._underway Worker._reads""",
    "parts of what the other tables hold": """
        BeamGroup.logprobs BeamSearch._finished ClientEvents.completed ClientEvents.failed ClientEvents.finished
        ClientEvents.handles ClientEvents.offsets ClientEvents.sequence_indices ClientEvents.token_ids
        ClientEvents.with_logprobs EmittedSequence.token_ids HiddenHashes._token_ids Outgoing.aborted Outgoing.batches
        Outgoing.has_room Outgoing.moved Outgoing.refusals Pin.blocks Pin.hashes Pin.token_ids PrefixHashes._hashes
        Request.emitted Request.prompt Sequence.token_ids SequenceGroup.sequences Timeline.milestones""",
    "of classes of these tests, which have more attributes": """
        BlockFile._written BlockManager._names Scheduler._compiled Scheduler._entered Scheduler._fetched
        Scheduler._had_drafts Scheduler._names Scheduler.pinned Scheduler.told_s
        Scheduler._own_losses Scheduler._pinned_until Scheduler._place_of Scheduler._started_at Scheduler._times_of
        Scheduler.asked Scheduler.forgotten SealInventory._arriving SealInventory._names _ObservedHashes._hashes""",
}
"""Tables that may have entries when the cluster is quiet, by reason."""
_KEPT = frozenset(name for names in KEPT.values() for name in names.split())


def held_by(*roots: object) -> dict[str, int]:
    """The number of entries in tables that should be empty, by class and attribute."""
    counts = Counter[str]()
    seen, waiting = set[int](), list[object](roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, (*_TABLES, tuple)):
            waiting += each.values() if isinstance(each, dict) else each
            continue
        for name, value in _attributes(each):
            if isinstance(value, asyncio.Queue):
                counts[name] += value.qsize()
            elif isinstance(value, _TABLES):
                counts[name] += len(value)
            waiting.append(value)
    return {name: count for name, count in sorted(counts.items()) if count and name not in _KEPT}


def _attributes(owner: object) -> Iterator[tuple[str, Any]]:
    """The attributes of an object of our packages, each with the name of its class."""
    kind = next((each for each in type(owner).__mro__ if each.__module__.startswith(_PACKAGES)), None)
    if kind is None or isinstance(owner, type) or kind.__module__.endswith(("_pb2", "_pb2_grpc")):
        return
    slots = (name for each in type(owner).__mro__ for name in getattr(each, "__slots__", ()))
    for name in dict.fromkeys((*getattr(owner, "__dict__", ()), *slots)):
        if (value := getattr(owner, name, None)) is not None:
            yield f"{kind.__name__}.{name}", value
