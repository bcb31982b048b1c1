"""OpenAI's Responses API in front of a fake scheduler, with OpenAI's own client."""

import asyncio

import pytest
import pytest_asyncio
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError

from tests.support.fake_scheduler import scripted
from tests.support.gateway_process import running_gateway
from tests.support.keys import KeysFile
from tests.support.rig import SPEECH, TEXT, prompt_text_of


@pytest_asyncio.fixture(loop_scope="session")
async def client(rig):
    async with AsyncOpenAI(base_url=f"{rig.gateway.http_url}/v1", api_key="unused", max_retries=0) as openai:
        yield openai


async def test_a_response_is_what_the_chat_says(client):
    response = await client.responses.create(
        model="quire-tiny", input="hello", instructions="Be brief.", metadata={"a": "b"}
    )
    chat = await client.chat.completions.create(
        model="quire-tiny", messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    )
    assert response.output_text == chat.choices[0].message.content == TEXT
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.instructions, response.metadata, response.tool_choice) == ("Be brief.", {"a": "b"}, "auto")
    assert chat.usage is not None
    assert response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens == len(SPEECH) + 1
    assert response.usage.total_tokens == chat.usage.total_tokens


async def test_an_empty_answer_is_a_message_without_text(client, rig):
    rig.scheduler.rule = scripted([2])
    response = await client.responses.create(model="quire-tiny", input="hello")
    assert [item.type for item in response.output] == ["message"]
    events = [event async for event in await client.responses.create(model="quire-tiny", input="hello", stream=True)]
    assert [item.type for item in events[-1].response.output] == ["message"]
    assert response.output_text == events[-1].response.output_text == ""


async def test_a_stream_has_every_event_in_order_and_the_response_at_its_end(client):
    stream = await client.responses.create(model="quire-tiny", input="hello", stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert deltas > 1
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    assert events[-4].text == events[-3].part.text == TEXT
    assert events[-2].item == events[-1].response.output[0]
    assert events[-1].response.output_text == TEXT
    assert events[0].response.id == events[-1].response.id
    assert len({event.item_id for event in events if hasattr(event, "item_id")} | {events[-2].item.id}) == 1


async def test_a_conversation_goes_on_from_what_is_kept_without_its_instructions(client, rig):
    first = await client.responses.create(model="quire-tiny", input="hello", instructions="Be brief.")
    second = await client.responses.create(model="quire-tiny", input="and then?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    prompt = prompt_text_of(rig.scheduler.submits[-1])
    assert "brief" not in prompt
    assert prompt.index("hello") < prompt.index("little dog") < prompt.index("and then?")
    third = await client.responses.create(model="quire-tiny", input="why?", previous_response_id=second.id)
    assert prompt_text_of(rig.scheduler.submits[-1]).startswith(prompt)
    assert (await client.responses.retrieve(third.id)) == third


async def test_the_items_of_the_input_are_listed(client):
    first = await client.responses.create(model="quire-tiny", input="hello", instructions="Be brief.")
    second = await client.responses.create(model="quire-tiny", input="and then?", previous_response_id=first.id)
    items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
    assert [(item.role, item.content[0].text) for item in items] == [
        ("user", "hello"), ("assistant", TEXT), ("user", "and then?"),
    ]  # fmt: skip
    with pytest.raises(NotFoundError):
        await client.responses.input_items.list("resp_other")


async def test_the_tokens_of_the_input_are_counted(client):
    tool = {"type": "function", "name": "look", "description": "d", "parameters": {"type": "object"}, "strict": None}
    first = await client.responses.create(model="quire-tiny", input="hello")
    asked = {"input": "and then?", "instructions": "Be brief.", "previous_response_id": first.id, "tools": [tool]}
    counted = await client.responses.input_tokens.count(model="quire-tiny", **asked)
    made = await client.responses.create(model="quire-tiny", **asked)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)
    with pytest.raises(BadRequestError) as raised:
        await client.responses.input_tokens.count(input="a", previous_response_id="resp_other")
    assert raised.value.param == "previous_response_id"


async def test_a_kept_response_is_deleted(client):
    stream = await client.responses.create(model="quire-tiny", input="hello", stream=True)
    response = [event async for event in stream][-1].response
    assert await client.responses.retrieve(response.id) == response
    await client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        for response_id in (response.id, "chatcmpl-1"):
            with pytest.raises(NotFoundError):
                await call(response_id)
    with pytest.raises(BadRequestError, match="send the items of the earlier turns in input") as raised:
        await client.responses.create(model="quire-tiny", input="a", previous_response_id=response.id)
    assert (raised.value.param, raised.value.code) == ("previous_response_id", "response_not_found")


async def test_a_gateway_that_keeps_nothing_says_so_in_the_response(scheduler):
    async with (
        running_gateway(scheduler, max_stored_response_bytes=0) as gateway,
        AsyncOpenAI(base_url=f"{gateway.http_url}/v1", api_key="unused", max_retries=0) as client,
    ):
        response = await client.responses.create(model="quire-tiny", input="hello", max_output_tokens=2)
        with pytest.raises(NotFoundError, match="--max-stored-response-bytes is 0"):
            await client.responses.retrieve(response.id)
        stored = await client.responses.create(model="quire-tiny", input="hello", store=True, max_output_tokens=2)
        assert stored.model_dump()["store"] is False


async def test_an_item_of_a_kept_response_stands_for_itself_in_the_next_turn(client):
    first = await client.responses.create(model="quire-tiny", input="hello", max_output_tokens=4)
    question = {"role": "user", "content": "and then?"}
    counts = [
        (await client.responses.input_tokens.count(input=[{"role": "user", "content": "hello"}, item, question]))
        for item in (
            first.output[0].model_dump(),
            {"type": "item_reference", "id": first.output[0].id},
            {"id": first.output[0].id},
            {"id": first.output[0].id, "type": None},
        )
    ]
    assert all(each == counts[0] for each in counts)
    with pytest.raises(BadRequestError, match="--response-store") as raised:
        await client.responses.create(input=[{"type": "item_reference", "id": first.output[0].id + "9"}, question])
    assert (raised.value.param, raised.value.code) == ("input[0].id", "response_not_found")


async def test_a_file_keeps_responses_for_the_gateways_after_it_and_for_their_tenants_alone(scheduler, tmp_path):
    keys = KeysFile(tmp_path / "keys.json")
    one, other = keys.add("one"), keys.add("other")
    settings = {"keys_files": (keys.path,), "response_store": f"sqlite:{tmp_path / 'kept.db'}"}
    responses = []
    for _ in range(2):
        async with (
            running_gateway(scheduler, **settings) as gateway,
            AsyncOpenAI(base_url=f"{gateway.http_url}/v1", api_key=one, max_retries=0) as client,
        ):
            for response in responses:
                assert await client.responses.retrieve(response.id) == response
                with pytest.raises(NotFoundError):
                    await client.with_options(api_key=other).responses.retrieve(response.id)
            earlier = responses[-1].id if responses else None
            asked = {"input": "hello", "previous_response_id": earlier, "max_output_tokens": 4}
            responses.append(await client.responses.create(**asked))
    assert (tmp_path / "kept.db").stat().st_mode & 0o077 == 0


async def test_the_oldest_turns_are_left_out_where_the_client_allows_it(client):
    turns = [{"role": role, "content": "a b c d e f g h"} for _ in range(100) for role in ("user", "assistant")]
    asked = [{"role": "system", "content": "Be kind."}, *turns, {"role": "user", "content": "And now?"}]
    with pytest.raises(BadRequestError) as raised:
        await client.responses.create(input=asked, max_output_tokens=100)
    assert raised.value.code == "context_length_exceeded"
    response = await client.responses.create(input=asked, max_output_tokens=100, truncation="auto")
    assert 700 < response.usage.input_tokens <= 924


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_response_that_runs_is_cancelled_by_its_id(client, rig, streaming):
    rig.scheduler.rule, rig.scheduler.step_delay_s = scripted(SPEECH), 0.01
    making = asyncio.create_task(drained(client, streaming))
    await rig.scheduler.until(lambda: rig.scheduler.live)
    response_id = rig.scheduler.submits[-1].request_id
    cancelled = await client.responses.cancel(response_id)
    assert (cancelled.id, cancelled.status) == (response_id, "cancelled")
    with pytest.raises(APIError, match="was cancelled"):
        await making
    await rig.scheduler.until(lambda: rig.scheduler.aborted == [response_id])


async def drained(client, streaming) -> None:
    made = await client.responses.create(model="quire-tiny", input="hello", stream=streaming)
    if streaming:
        async for _ in made:
            pass


async def test_what_shall_not_be_stored_is_not(client):
    response = await client.responses.create(model="quire-tiny", input="hello", store=False)
    with pytest.raises(NotFoundError, match="not known to this gateway"):
        await client.responses.retrieve(response.id)


async def test_a_compacted_conversation_has_the_users_messages_and_a_summary_that_can_be_sent_back(client, rig):
    first = await client.responses.create(model="quire-tiny", input="I am Alice.")
    rig.says("Alice came.")
    short = await client.responses.compact(
        model="quire-tiny", previous_response_id=first.id, input=[{"role": "user", "content": "Who?"}]
    )
    assert (short.object, short.usage.input_tokens_details.cached_tokens) == ("response.compaction", 0)
    assert [item.type for item in short.output] == ["message", "message", "compaction"]
    assert [item.content[0].text for item in short.output[:2]] == ["I am Alice.", "Who?"]
    assert TEXT.strip() in prompt_text_of(rig.scheduler.submits[-1])
    output = [item.to_dict(warnings=False) for item in short.output]
    later = await client.responses.create(model="quire-tiny", input=[*output, {"role": "user", "content": "And now?"}])
    assert later.status == "completed"
    prompt = prompt_text_of(rig.scheduler.submits[-1])
    assert prompt.index("Who?") < prompt.index("Alice came.") < prompt.index("And now?")
    assert TEXT.strip() not in prompt
    with pytest.raises(BadRequestError) as refused:
        await client.responses.compact(model="quire-tiny")
    assert refused.value.param == "input"
