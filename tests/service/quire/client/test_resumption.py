"""Durable streams of both clients go on after the connection to their gateway is lost, through another gateway."""

import contextlib
from collections import defaultdict
from pathlib import Path

import pytest

from quire.client import AsyncClient, Client, GenerationOptions, TokenChunk
from tests.support.cut_link import cut_link
from tests.support.either_client import EitherClient
from tests.support.scheduler_process import wait_nothing_in_use
from tests.support.two_gateways import two_gateways

OPTIONS = GenerationOptions(seed=5, temperature=1.0, max_tokens=80, ignore_eos=True, n=2)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_stream_goes_on_through_the_other_gateway(
    kind: type[Client] | type[AsyncClient], tmp_path: Path
) -> None:
    async with two_gateways(tmp_path) as gateways, contextlib.AsyncExitStack() as stack:
        links = [await stack.enter_async_context(cut_link(each.gateway.grpc_address)) for each in gateways.both]
        client = EitherClient(kind([link.address for link in links]))
        whole = await client.call("generate", "hello", OPTIONS)
        stream, num_chunks = client.client.generate_stream("hello", OPTIONS, durable=True, timeout_s=30), 0
        token_ids, texts = defaultdict[int, list[int]](list), defaultdict[int, str](str)
        while stream.completed is None:
            event = await client.next(stream)
            if isinstance(event, TokenChunk):
                assert event.offset == len(token_ids[event.sequence_index])
                token_ids[event.sequence_index] += event.token_ids
                texts[event.sequence_index] += event.text
                num_chunks += 1
                if num_chunks == 5:
                    (busy,) = (i for i, each in enumerate(gateways.both) if len(each.gateway._ledger))
                    links[busy].cut()
        assert num_chunks > 5
        assert token_ids == {each.index: list(each.token_ids) for each in whole.sequences}
        assert texts == {each.index: each.text for each in whole.sequences}
        await client.close_stream(stream)
        await client.close()
        await wait_nothing_in_use(gateways.scheduler)
