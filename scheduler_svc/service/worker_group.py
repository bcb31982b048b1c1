"""The step streams to all ranks of a replica, driven as one."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from quire.compatibility import check_model
from quire.rpc.errors import FailedPrecondition
from quire.rpc.tls import TlsIdentity
from scheduler_svc.core.block_pool import BlockHash, BlockId
from scheduler_svc.core.step import StepPlan
from scheduler_svc.service.replica import ReplicaInfo
from scheduler_svc.service.worker_convert import RankPlace, StepAnswer, step_message
from scheduler_svc.service.worker_link import WorkerLink, WorkerLostError


class StepLink(Protocol):
    """The workers of a replica, attached: one, or a group of ranks. See WorkerLink."""

    info: ReplicaInfo
    sealed: list[tuple[BlockId, BlockHash]]
    address: str

    async def send(self, plan: StepPlan) -> None: ...

    async def receive(self) -> StepAnswer | None: ...

    async def close(self) -> None: ...


async def attach_workers(
    addresses: Sequence[str], epoch: int, timeout_s: float, tls: TlsIdentity | None = None
) -> StepLink:
    """Attaches all ranks of a replica under one epoch, or none: a rank that waits for one that cannot be had is not
    waited for.

    Args:
        addresses: in order of rank.

    Raises:
        WorkerLostError: one of them cannot be had, or they are not the ranks of one group.
    """
    attaching = [asyncio.create_task(WorkerLink.attach(address, epoch, timeout_s, tls)) for address in addresses]
    try:
        done, _ = await asyncio.wait(attaching, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        links = [task.result() for task in attaching]
        _check_places(links)
    except BaseException:
        for task in attaching:
            task.cancel()
        outcomes = await asyncio.gather(*attaching, return_exceptions=True)
        await asyncio.gather(*(outcome.close() for outcome in outcomes if isinstance(outcome, WorkerLink)))
        raise
    return links[0] if len(links) == 1 else WorkerGroup(links, epoch)


class WorkerGroup:
    """Several ranks. Each gets the same bytes of every step; the first one's answer counts when all have answered.

    The group is lost with any of its ranks.
    """

    def __init__(self, links: Sequence[WorkerLink], epoch: int) -> None:
        first, *others = self._links = tuple(links)
        self.info = first.info
        self.address = ", ".join(link.address for link in links)
        # All ranks hold parts of the same blocks; what one of them has lost is of no use.
        everywhere = set(first.sealed).intersection(*(link.sealed for link in others))
        self.sealed = [entry for entry in first.sealed if entry in everywhere]
        self._epoch = epoch
        self._num_ahead = [0] * len(links)
        self._answers: asyncio.Queue[tuple[int, StepAnswer | Exception | None]] = asyncio.Queue()
        self._pending: list[StepAnswer] = []
        self._readers = [asyncio.create_task(self._read(rank, link)) for rank, link in enumerate(links)]

    async def send(self, plan: StepPlan) -> None:
        """Hands a step to all ranks, serialized once. Raises WorkerLostError."""
        message = step_message(plan, self._epoch, self.info.worker_generation)
        await asyncio.gather(*(link.write(message) for link in self._links))

    async def receive(self) -> StepAnswer | None:
        """The first rank's next answer, once all ranks have given theirs, or None for a heartbeat of the first one.

        Raises:
            WorkerLostError: a rank was lost.
        """
        while not (self._pending and min(self._num_ahead) > 0):
            rank, answer = await self._answers.get()
            if isinstance(answer, Exception):
                raise answer
            if answer is not None:
                self._num_ahead[rank] += 1
            if rank == 0:
                if answer is None:
                    return None
                self._pending.append(answer)
        self._num_ahead = [ahead - 1 for ahead in self._num_ahead]
        return self._pending.pop(0)

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links))

    async def _read(self, rank: int, link: WorkerLink) -> None:
        while True:
            try:
                self._answers.put_nowait((rank, await link.receive()))
            except Exception as error:
                # Whatever it is: nobody else awaits this task before the group is closed.
                self._answers.put_nowait((rank, error))
                return


def _check_places(links: Sequence[WorkerLink]) -> None:
    """Raises WorkerLostError unless the links are all ranks of one group in order, alike in all that a plan needs."""
    first = links[0]
    for rank, link in enumerate(links):
        if link.place != RankPlace(rank, len(links)):
            raise WorkerLostError(
                f"worker {link.address} is rank {link.place.rank} of {link.place.world_size}; "
                f"--workers names it as rank {rank} of {len(links)}"
            )
        if replace(link.info, fingerprint=first.info.fingerprint) != first.info:
            raise WorkerLostError(f"worker {link.address} differs from rank 0: {_difference(first, link)}")
        try:
            # A rank may lack parts of the model that it does not need, as the tokenizer.
            check_model(first.info.fingerprint, link.info.fingerprint, us="rank 0", them=f"worker {link.address}")
        except FailedPrecondition as error:
            raise WorkerLostError(str(error)) from error


def _difference(first: WorkerLink, other: WorkerLink) -> str:
    if replace(other.info, worker_generation=first.info.worker_generation) == first.info:
        return "it belongs to another start of the group"
    return f"{other.info} and {first.info}"
