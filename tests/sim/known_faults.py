"""Known faults, put back one at a time: the worlds have to find each.

`python -m tests.sim.known_faults [NAME...] [--worlds 1000] [--first 0]` runs worlds from the first seed on until one
fails, and prints a row of docs/internals/known_faults.md for each fault. A world that fails without the fault, too,
does not count, and one that does not come to the lines that a fault changes is not run with it. A patch that does not
apply any more fails loudly: where the code has changed, the fault is to be written anew for what stands there now.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.sim.mutation import Patch, Reach, patched
from tests.sim.worlds import draw_plan, run_world

_BATCH = "scheduler_svc.core.batch"
_POOL = "scheduler_svc.core.block_pool"
_INVARIANTS = "scheduler_svc.core.invariants"
_KV = "scheduler_svc.core.kv_cache"
_PLACEMENT = "scheduler_svc.core.placement"
_RESULTS = "scheduler_svc.core.results"
_SCHEDULER = "scheduler_svc.core.scheduler"
_SEQUENCE = "scheduler_svc.core.sequence"
_OUTBOX = "scheduler_svc.service.outbox"
_REQUESTS = "scheduler_svc.service.requests"
_SERVICER = "scheduler_svc.service.servicer"
_STEP_LOOP = "scheduler_svc.service.step_loop"
_WORKER_LINK = "scheduler_svc.service.worker_link"
_PREPARATION = "scheduler_svc.core.preparation"
_TRIALS = "scheduler_svc.core.fault_isolation"
_SEALS = "worker_svc.device.seals"
_LEDGER = "worker_svc.device.row_ledger"
_SESSION = "worker_svc.protocol.session"
_STREAM = "worker_svc.protocol.stream"
_LINK = "gateway.replicas.link"
_REPLICAS = "gateway.replicas.replica_set"
_GATEWAY_SEQUENCE = "gateway.replicas.sequence"
_BEAMS = "scheduler_svc.core.beam_search"
_PINS = "scheduler_svc.core.pins"
_QUOTA = "gateway.auth.quota"
_GENERATOR = "gateway.request.generator"
_PREPARE = "gateway.request.prepare"
_CALLS = "gateway.replicas.scheduler_calls"
_STOP = "gateway.text.stop"


@dataclass(frozen=True, slots=True)
class KnownFault:
    """A fault of the product.

    Attributes:
        what: What is wrong, for people.
        was_there: Whether the product had it once; else it was made by hand.
    """

    name: str
    what: str
    patches: tuple[Patch, ...]
    was_there: bool = False


def _made(name: str, what: str, module: str, old: str, new: str) -> KnownFault:
    return KnownFault(name, what, (Patch(module, old, new),))


def _mended(name: str, what: str, module: str, old: str, new: str) -> KnownFault:
    return KnownFault(name, what, (Patch(module, old, new),), was_there=True)


FAULTS = (
    _made(
        "dropped-copy",
        "a shared block is replaced by one of the sequence's own, and not copied",
        _BATCH,
        "            self.draft.copies.append(pair)\n",
        "            pass\n",
    ),
    _made(
        "slot-off-by-one",
        "a decode gets its next block one token too late",
        _BATCH,
        "return rows[self.num_slots[rows] <= self.num_computed[rows]]",
        "return rows[self.num_slots[rows] < self.num_computed[rows]]",
    ),
    _made(
        "one-token-too-many",
        "a sequence decodes once more after its last token",
        _BATCH,
        "can_compute = (num_tokens < self.max_len) & (self.num_computed < num_tokens)",
        "can_compute = (num_tokens <= self.max_len) & (self.num_computed < num_tokens)",
    ),
    _made(
        "lost-row",
        "a row is not given back when its sequence ends",
        _BATCH,
        "            heapq.heappush(self._free, row)\n",
        "            pass\n",
    ),
    _mended(
        "seal-of-another",
        "a block that was handed out anew before its seal was announced is announced",
        _BATCH,
        "        self.draft.sealed = self.blocks.still_sealed(self.draft.sealed)\n",
        "",
    ),
    _made(
        "seal-too-early",
        "a block counts as full with its first token",
        _RESULTS,
        "num_full = (batch.rows.num_known[step.rows] - 1) // batch.blocks.block_size",
        "num_full = -(-(batch.rows.num_known[step.rows] - 1) // batch.blocks.block_size)",
    ),
    _made(
        "released-row",
        "the result of a row that was released since counts for the sequence that has it now",
        _RESULTS,
        "        current = table.incarnation[step.rows] == step.incarnations\n        if step.max_drafts",
        "        current = table.incarnation[step.rows] >= step.incarnations\n        if step.max_drafts",
    ),
    _made(
        "freed-block-in-table",
        "a sequence that gave its blocks back still has them in its table",
        _KV,
        "        self.pool.free(*(sequence.block_table for sequence in sequences))\n"
        "        for sequence in sequences:\n"
        "            sequence.block_table = []\n",
        "        self.pool.free(*(sequence.block_table for sequence in sequences))\n",
    ),
    _made(
        "stale-cached-start",
        "what was found in the prefix cache once is taken for found for good",
        _POOL,
        "            if not set(recent).isdisjoint(start.blocks):\n                return False\n",
        "",
    ),
    _made(
        "evicted-block-found",
        "a cached block that is handed out anew can still be hit",
        _POOL,
        "                del self._by_hash[content]\n",
        "",
    ),
    _made(
        "follower-never-released",
        "a request that waits for blocks of another one is not told that they are there",
        _KV,
        "        keys, self._released = self._released, []\n        return keys",
        "        self._released = []\n        return []",
    ),
    _made(
        "whole-prompt-cached",
        "all tokens of a sequence may be taken from the cache, so that there are no logits",
        _SEQUENCE,
        "            return self.num_tokens - 1\n        return min",
        "            return self.num_tokens\n        return min",
    ),
    _made(
        "swap-in-without-copy",
        "sequences that come back from host memory write to a block that they share, and copy it not",
        _PLACEMENT,
        "batch.rows.shares_tail[row] = len(computing) > 1",
        "batch.rows.shares_tail[row] = False",
    ),
    _made(
        "swap-in-forgotten",
        "a group is back in the batch, and its blocks are not copied back",
        _PLACEMENT,
        "        batch.draft.swap_in += swapped_in.pairs\n",
        "",
    ),
    _made(
        "newest-token-swapped",
        "the newest token of a swapped sequence counts as computed",
        _PLACEMENT,
        "sequence.num_swapped_tokens = min(int(batch.rows.num_computed[sequence.row]), sequence.num_tokens - 1)",
        "sequence.num_swapped_tokens = int(batch.rows.num_tokens[sequence.row])",
    ),
    _made(
        "host-pool-overfull",
        "groups are swapped out without a look at the room in host memory",
        _KV,
        "        return len(_distinct(self._kept(sequence) for sequence in sequences)) <= self.pool.num_free",
        "        return bool(sequences)",
    ),
    _made(
        "blocks-of-lost-worker",
        "the prefix cache outlives the worker whose blocks are in it",
        _SCHEDULER,
        "        self._make_pools()\n        for pin in self.pins.lose_blocks():",
        "        cached = [(b, self.batch.blocks.pool.hash_of(b)) for b in range(self.config.num_blocks)]\n"
        "        self._make_pools()\n"
        "        self.restore_sealed([(b, name) for b, name in cached if name is not None])\n"
        "        for pin in self.pins.lose_blocks():",
    ),
    _made(
        "seal-outlives-content",
        "a worker goes on to call a block final that a later step writes to",
        _SEALS,
        "            self._sealed[block_ids] = 0\n            self._last_written[block_ids] = step_number\n",
        "            self._last_written[block_ids] = step_number\n",
    ),
    _made(
        "rows-outlive-session",
        "a worker keeps the rows of its scheduler before",
        _STREAM,
        "        self._ledger.reset()\n",
        "",
    ),
    _made(
        "epoch-compared-with-ge",
        "a worker refuses a newer epoch where the session of the one before has not ended",
        _SESSION,
        "            if epoch == highest:\n",
        "            if epoch >= highest:\n",
    ),
    _mended(
        "clock-set-back",
        "a worker refuses a scheduler whose clock was set back, however long nobody else comes",
        _SESSION,
        "epoch < highest and not self._is_vacant(now)",
        "epoch < highest",
    ),
    _mended(
        "hash-of-other-block-size",
        "requests move to a worker with blocks of another size, and keep the names of blocks",
        _SCHEDULER,
        "                group.move_to_blocks_of(self.config.block_size)\n",
        "",
    ),
    _made(
        "offset-counted-twice",
        "the offset of a kept output's first token is added twice when a reader comes back",
        _OUTBOX,
        "        events.offsets += range(output.first + skipped, output.first + end)\n",
        "        events.offsets += range(2 * output.first + skipped, 2 * output.first + end)\n",
    ),
    _made(
        "replayed-twice",
        "what a reader was sent when it came back is kept, and sent again the next time",
        _REQUESTS,
        "        if owned.durable is None:\n            owned.history.clear()\n",
        "",
    ),
    KnownFault(
        "untaken-dropped",
        "messages that a gateway has not taken in when its stream breaks are dropped, and nobody sees the gap",
        (
            Patch(
                _OUTBOX,
                "        return [*self._sent, *self._waiting]\n",
                "        return [*self._waiting]\n",
            ),
            Patch(
                _OUTBOX,
                "        return not any(self._lacks(each, held)",
                "        return True or not any(self._lacks(each, held)",
            ),
        ),
    ),
    _made(
        "lost-credit",
        "a gateway gives credit for one message where it took two",
        _LINK,
        "                        self._grant(_MESSAGES_OF_CREDIT, num_taken)\n",
        "                        self._grant(1, num_taken)\n",
    ),
    _made(
        "no-resubmission",
        "a gateway whose scheduler is back does not submit what ran there",
        _REPLICAS,
        "        self._for_each(self._ledger.of_replica(link.address), lambda live: self._submit(live, link))\n",
        "",
    ),
    KnownFault(
        "accepted-twice",
        "a reader that comes back is sent what it has already, and its gateway takes it again",
        (
            Patch(
                _OUTBOX,
                "                self.add_tokens(events, handle, index, held.num_tokens.get(index, 0))\n",
                "                self.add_tokens(events, handle, index, 0)\n",
            ),
            Patch(
                _GATEWAY_SEQUENCE,
                "        for position in range(seen, len(token_ids)):\n",
                "        for position in range(min(seen, 1), len(token_ids)):\n",
            ),
        ),
    ),
    _made(
        "seal-before-finite",
        "what a row computed is sealed, although its sample was not finite",
        _RESULTS,
        "            if row in result.failures:\n",
        "            if row in ():\n",
    ),
    _made(
        "chunk-sealed-before-finite",
        "a chunk of a prompt is sealed, although it was not finite",
        _RESULTS,
        "            batch.rows.seals_chunks[invalid] = False\n",
        "",
    ),
    _made(
        "beams-pruned-wrong",
        "hypotheses beyond the best of a beam search's step are kept",
        _BEAMS,
        "finished = self._finish(likely[: self._parameters.width], outputs, length)",
        "finished = self._finish(likely, outputs, length)",
    ),
    _made(
        "beam-forks-last-token",
        "a beam that forks keeps the blocks of the one that was dropped",
        _RESULTS,
        "        self._batch.blocks.free(*dropped)\n",
        "",
    ),
    _made(
        "fork-keeps-seed",
        "the samples of one prompt all draw with the seed of the first",
        _BATCH,
        "                self.draft.seeds[child.row] = child.request.sampling_of(child.index).seed\n",
        "",
    ),
    _made(
        "pin-not-counted",
        "a pin has blocks and is none of their holders",
        _PINS,
        "        pool.touch(blocks)\n",
        "",
    ),
    _made(
        "quota-not-given-back",
        "a request that is over counts for the limit of its key",
        _QUOTA,
        "            del self._running[use]\n            self._charge(use)\n",
        "            self._charge(use)\n",
    ),
    _made(
        "durable-replayed-twice",
        "who resumes a durable stream gets the tokens again that it has",
        _GENERATOR,
        "skip(offset.num_tokens, offset.num_characters)",
        "skip(0, 0)",
    ),
    _made(
        "replay-goes-on",
        "a durable output goes on to its reader of before when another one has come",
        _REQUESTS,
        "            before.connection.outbox.drop_replay(before.handle)\n",
        "",
    ),
    _made(
        "events-during-replay",
        "new tokens of a durable request go to a reader before those that it lacks",
        _REQUESTS,
        "            del self._readers[owned.key.handle]\n            go_on",
        "            go_on",
    ),
    _made(
        "log-probabilities-of-others",
        "a reader that comes back gets the first log probabilities with the tokens that it lacks",
        _OUTBOX,
        "            events.logprobs.append(output.logprobs.part(skipped, end))\n",
        "            events.logprobs.append(output.logprobs.part(0, end - skipped))\n",
    ),
    _made(
        "reconnect-loses-abort",
        "a gateway that is back does not say which of its requests nobody reads any more",
        _LINK,
        "        self._send(scheduler_pb2.ConnectRequest(end_unread=scheduler_pb2.EndUnread()))\n",
        "",
    ),
    _made(
        "leaves-without-abort",
        "a client that leaves does not end its request",
        _REPLICAS,
        "        if link.is_connected:\n            link.abort(live.handle)\n        elif",
        "        if link.is_connected:\n            pass\n        elif",
    ),
    _mended(
        "gap-after-end",
        "tokens that come after the end of a sequence count as a gap",
        _GATEWAY_SEQUENCE,
        "        if self.finished is not None:\n            return 0\n        before = len(self.token_ids)\n",
        "        before = len(self.token_ids)\n",
    ),
    _mended(
        "ends-in-recomputation",
        "a sequence that ends while it computes what others share takes it away from them",
        _SCHEDULER,
        "all of a prompt.\n            self._placement.requeue(group)\n",
        "all of a prompt.\n            pass\n",
    ),
    _mended(
        "cached-output-counted",
        "output of an earlier scheduler that is cached counts as a part of the prompt",
        _PLACEMENT,
        "group.cached_tokens = min(num_cached, len(group.request.prompt))",
        "group.cached_tokens = num_cached",
    ),
    _mended(
        "ends-by-own-deadline",
        "a durable stream that is resumed ends by the deadline of its gateway towards a scheduler that hangs",
        _CALLS,
        "        if isinstance(error, DeadlineExceeded):\n",
        "        if isinstance(error, str):\n",
    ),
    _mended(
        "continued-without-prompt",
        "a stream that goes on from its client's tokens lacks the log probabilities of its prompt",
        _PREPARE,
        "    begins_anew = bool(num_prompt_logprobs(live.request))\n",
        "    begins_anew = False\n",
    ),
    _mended(
        "other-pool-untold",
        "requests that move to another pool are dropped without a word",
        _SCHEDULER,
        "                self._enqueue(group)\n        for pin in old.pins:\n",
        "                pass\n        for pin in old.pins:\n",
    ),
    _mended(
        "hold-behind",
        "a request waits for blocks of another one that comes after it",
        _SCHEDULER,
        "        if row is None or batch.rows.order[row] > group.order:\n",
        "        if row is None:\n",
    ),
    _made(
        "ranks-not-compared",
        "the tokens of a rank that draws others than rank 0 are believed",
        _WORKER_LINK,
        "            if len(crc32s) > 1:\n",
        "            if len(crc32s) > 2:\n",
    ),
    _made(
        "prepared-by-one-rank",
        "a constraint counts as compiled when the first rank has compiled it",
        _WORKER_LINK,
        "                if len(answers) < len(self._links):\n",
        "                if not answers:\n",
    ),
    _made(
        "epoch-not-agreed",
        "a rank that waits in a step which not all ranks have is not told of the next epoch",
        _STREAM,
        "            self._agree(epoch, _NO_STEP)\n",
        "",
    ),
    _made(
        "stop-string-not-held-back",
        "text that may become a stop string goes out",
        _STOP,
        "                if stop_string.startswith(seen[start:]):\n",
        "                if stop_string == seen[start:]:\n",
    ),
    _made(
        "held-text-lost",
        "text that did not become a stop string is lost at the end",
        _GATEWAY_SEQUENCE,
        "                text += self._matcher.flush()\n",
        "                self._matcher.flush()\n",
    ),
    _made(
        "resumed-by-tokens",
        "who resumes a stream gets no text of the tokens that it has, be it held back then",
        _GENERATOR,
        "skip(offset.num_tokens, offset.num_characters)",
        "skip(offset.num_tokens, None)",
    ),
    KnownFault(
        "logprobs-of-seen-tokens",
        "a gateway that gets what it has once more gives new tokens the log probabilities of those",
        (
            Patch(
                _OUTBOX,
                "                self.add_tokens(events, handle, index, held.num_tokens.get(index, 0))\n",
                "                self.add_tokens(events, handle, index, 0)\n",
            ),
            Patch(
                _GATEWAY_SEQUENCE,
                "            self._pending_logprobs.append(logprobs.part(seen, seen + count))\n",
                "            self._pending_logprobs.append(logprobs.part(0, count))\n",
            ),
        ),
    ),
    _made(
        "priority-ignored",
        "the policy `priority` takes requests in the order of arrival",
        "scheduler_svc.core.policy",
        "(MAX_PRIORITY - request.priority) * self._ORDERS_PER_PRIORITY + arrival",
        "MAX_PRIORITY * self._ORDERS_PER_PRIORITY + arrival",
    ),
    _made(
        "pin-ends-early",
        "a pin ends a second before its time",
        _PINS,
        "pin.expires_at <= now else None",
        "pin.expires_at <= now + 1.0 else None",
    ),
    _made(
        "tenants-share-names",
        "blocks of two tenants with the same tokens have the same name",
        "quire.prefix_hashes",
        "blake2b(tenant.encode(), digest_size",
        "blake2b(b'', digest_size",
    ),
    _made(
        "credit-ignored",
        "a scheduler sends a gateway more messages than it takes",
        _OUTBOX,
        "bool(self._waiting or self._replays) and self._credit != 0",
        "bool(self._waiting or self._replays)",
    ),
    _made(
        "one-request-too-many",
        "a key may have one request more at once than its limit",
        _QUOTA,
        'len(self._running) + num_requests > limit:\n                _refuse_concurrency(f"{len',
        'len(self._running) + num_requests > limit + 1:\n                _refuse_concurrency(f"{len',
    ),
    _made(
        "placed-for-ever",
        "a request that left a replica counts for its load",
        _REPLICAS,
        "            self._placed[live.replica].discard(live.handle)\n",
        "            pass\n",
    ),
    _made(
        "silence-unnoticed",
        "a worker that is silent is waited for without limit",
        _WORKER_LINK,
        "        while silent < _MAX_SILENT_CHECKS:\n",
        "        while True:\n",
    ),
    _made(
        "shared-block-swapped-alone",
        "a block that sequences share is one block less in host memory than they count",
        _KV,
        "            self.pool.touch(shared)\n            moved = [block for block in kept",
        "            moved = [block for block in kept",
    ),
    _made(
        "fork-unmarked",
        "sequences that forked take the block that they write to for their own",
        _BATCH,
        "        self.shares_tail[[parent, child]] = self.num_tokens[parent] % block_size != 0\n",
        "        self.shares_tail[[parent, child]] = False\n",
    ),
    _made(
        "ledger-without-forks",
        "a worker's ledger gives a forked row no blocks",
        _LEDGER,
        "        for each in (*self._columns, self._tables[:, :num_blocks]):\n",
        "        for each in self._columns:\n",
    ),
    _made(
        "durable-counted-as-before",
        "tokens of durable requests are counted as they were before the last steps",
        _REQUESTS,
        "            self._durable.changed()\n        for connection, part",
        "            pass\n        for connection, part",
    ),
    _made(
        "taken-in-unanswered",
        "a plain request that is over is kept after its gateway has taken in the end",
        _REQUESTS,
        "owned.is_over and owned.durable is None:\n                    self.forget(owned)\n",
        "owned.is_over and owned.durable is None:\n                    pass\n",
    ),
    _mended(
        "preparation-not-counted",
        "what the worker dies of while it prepares it is prepared again and again",
        _SCHEDULER,
        "        if self.in_flight or needs:\n",
        "        if self.in_flight:\n",
    ),
    _mended(
        "stop-ends-others",
        "a stop string of one sequence drops what a reader has yet to be sent of the others",
        _SERVICER,
        '        if owned is None and not abort.HasField("sequence_index"):\n',
        "        if owned is None:\n",
    ),
    _made(
        "early-deadline",
        "a client gives a gateway half of the time that is left",
        "quire.client.retries",
        "max(self.end - self.clock(), 0.0)",
        "max(self.end - self.clock(), 0.0) / 2",
    ),
    _made(
        "last-token-not-sent",
        "a client that goes on from its tokens sends one less than it has",
        "quire.client.retries",
        "                token_ids=each.token_ids,\n",
        "                token_ids=each.token_ids[:-1],\n",
    ),
    _made(
        "wake-lost",
        "when something was prepared the scheduler goes on only at the next occasion",
        _STEP_LOOP,
        "        self._emit(0, events)\n        self._wake.set()\n\n    def _check_progress",
        "        self._emit(0, events)\n\n    def _check_progress",
    ),
    _made(
        "wake-lost-after-giving-up",
        "so it does when it has given up a constraint or an adapter",
        _STEP_LOOP,
        "        self._emit(0, events)\n        self._wake.set()\n\n    def _emit",
        "        self._emit(0, events)\n\n    def _emit",
    ),
    _made(
        "swapped-not-released",
        "a swapped request waits for ever for an adapter that left its slot meanwhile",
        _SCHEDULER,
        "itertools.product(keys, (self.waiting, self.swapped))",
        "itertools.product(keys, (self.waiting,))",
    ),
    _made(
        "old-steps-late",
        "a scheduler waits for steps that were in flight at a worker that it lost",
        _STEP_LOOP,
        "for awaited in (self._steps, self._preparations, self._moves):",
        "for awaited in (self._preparations, self._moves):",
    ),
    _made(
        "taken-counted-twice",
        "of several messages that a gateway has taken in at once one is counted twice",
        _OUTBOX,
        "        self._num_taken += len(new)\n",
        "        self._num_taken += len(new) + (len(new) > 1)\n",
    ),
    _made(
        "stays-draining",
        "a scheduler that drained once gets nothing new when it is back",
        _REPLICAS,
        "        self._some_connected.set()\n        self._draining.discard(link.address)\n",
        "        self._some_connected.set()\n",
    ),
    _made(
        "fault-without-trial",
        "a request is at fault for losses at other steps of it",
        _TRIALS,
        "LOSSES_ON_TRIAL and self.num_alone >= LOSSES_ON_TRIAL",
        "LOSSES_ON_TRIAL and self.num_alone >= 0",
    ),
    _made(
        "live-link-counts",
        "a link that breaks counts as a loss of the worker",
        _TRIALS,
        "if loss is None or (was_alive and loss.has_answered):",
        "if loss is None:",
    ),
    _made(
        "suspect-beside-steps",
        "what may be deadly is prepared while steps are in flight",
        _PREPARATION,
        "if self._underway or not is_idle:",
        "if self._underway:",
    ),
    _made(
        "prepared-not-cleared",
        "losses count for what was prepared since",
        _PREPARATION,
        "        self.trials.prepared(need)\n        fails",
        "        fails",
    ),
    _mended(
        "late-not-counted",
        "a constraint that is compiled late is in the place of another one, and nobody knows",
        _PREPARATION,
        "                self._note_compiled(late.need)\n                return self._take_held(late.need)\n",
        "                return []\n",
    ),
    KnownFault(
        "load-keeps-slot",
        "a load that never ends keeps its slot of an adapter",
        (
            Patch(_PREPARATION, "            self._adapters.loaded(late.slot, None)\n", "            pass\n"),
            # What finds it at once is younger than the fault.
            Patch(_INVARIANTS, "    if loading != awaited:\n", "    if ():\n"),
        ),
        was_there=True,
    ),
    _mended(
        "adapters-after-constraints",
        "constraints push each other out before an adapter begins to load",
        _PREPARATION,
        "missing[0])\n        self._release(request.key)\n",
        "missing[0])\n        self.ended(request.key)\n        need = missing[0]\n",
    ),
    KnownFault(
        "two-schedulers-fight",
        "a scheduler that is refused for a newer one tries again, with an epoch that rises each time",
        (
            Patch(
                _WORKER_LINK,
                "    if error.reason in _OTHER_SCHEDULER:\n        return WorkerTakenError\n",
                "",
            ),
            Patch(
                _WORKER_LINK,
                "    return int(started_at_s * 1e3) << _ATTEMPT_BITS\n",
                "    return int(started_at_s * 1e3)\n",
            ),
        ),
        was_there=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """The first world that finds a fault, and how.

    Attributes:
        num_worlds: How many worlds ran with the fault, this one included: those that come to what it changes.
        seconds: What that took, of a processor.
        how: The error that the world failed by.
    """

    seed: int
    num_worlds: int
    seconds: float
    how: str


def find(faults: Sequence[KnownFault], seeds: Iterable[int]) -> Iterator[tuple[KnownFault, Found]]:
    """Runs worlds with each fault until one fails that does not fail without it. Gives what is found as it is found.

    Raises StalePatchError.
    """
    left, num_worlds = list(faults), Counter[str]()
    seconds = dict.fromkeys((fault.name for fault in faults), 0.0)
    with Reach(patch for fault in faults for patch in fault.patches) as reach:
        for seed in seeds:
            if not left:
                return
            own, reached = _problem_of(seed), reach.take()
            if own is not None:
                print(f"world {seed} fails without any fault: {own}", file=sys.stderr)
                continue
            for fault in [each for each in left if not reached.isdisjoint(each.patches)]:
                started = time.process_time()
                with patched(*fault.patches):
                    how = _problem_of(seed)
                seconds[fault.name] += time.process_time() - started
                num_worlds[fault.name] += 1
                if how is not None:
                    left.remove(fault)
                    yield fault, Found(seed, num_worlds[fault.name], seconds[fault.name], how)


def _problem_of(seed: int) -> str | None:
    """By which error a world fails; None where it does not."""
    try:
        run_world(draw_plan(seed))
    except Exception as error:
        return type(error.__cause__ or error).__name__
    return None


def main(argv: list[str]) -> int:
    """Prints a row of a table for each fault; returns 1 where one is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.known_faults")
    parser.add_argument("names", nargs="*", help="faults to look for; all by default")
    parser.add_argument("--worlds", type=int, default=1000, help="how many worlds to run at most for each")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - {fault.name for fault in FAULTS}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    faults = [fault for fault in FAULTS if not arguments.names or fault.name in arguments.names]
    missed = {fault.name: fault for fault in faults}
    for fault, found in find(faults, range(arguments.first, arguments.first + arguments.worlds)):
        del missed[fault.name]
        print(_row(fault, f"{found.seed} | {found.num_worlds} | {found.seconds:.1f} | `{found.how}`"), flush=True)
    for fault in missed.values():
        print(_row(fault, f"not in {arguments.worlds} worlds | | |"))
    return 1 if missed else 0


def _row(fault: KnownFault, told: str) -> str:
    return f"| `{fault.name}` | {'was there' if fault.was_there else 'made'} | {told} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
