"""The page in headless Chromium: its views with a live server, by mouse, by keyboard and on a phone. These tests make
the pictures of README.md and docs/ui.md."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support.scheduler_process import until
from tests.support.serving import Served

MAX_IMAGE_BYTES = 200_000
MAX_MOVING_BYTES = 600_000
FILM_MS = 300
PICTURE = {"width": 1120, "height": 680}
PHONE = {"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True}
PROMPT = "Once upon a time there was a fox who lived in a wood with many friends and slept in a hollow tree. "


@contextlib.asynccontextmanager
async def busy(served: Served, count: int = 24) -> AsyncIterator[None]:
    """Runs samples, beams and plain completions during the block."""
    async with httpx.AsyncClient(base_url=f"http://{served.server.http_address}", timeout=120) as http:

        async def run(index: int) -> None:
            kinds: list[dict[str, Any]] = [{"n": 4}, {}, {"use_beam_search": True, "n": 3, "temperature": 0}, {}]
            body = {"prompt": PROMPT + f"Number {index % 5}.", "temperature": 1.0, "ignore_eos": True, "seed": index}
            body |= {"max_tokens": 120 + 11 * (index % 9), "request_id": f"request-{index}"} | kinds[index % 4]
            while True:
                (await http.post("/v1/completions", json=body)).raise_for_status()

        tasks = [asyncio.create_task(run(index)) for index in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await served.client.server_info()


async def take(page: Any, path: Path) -> None:
    """Takes a small picture for the documents."""
    picture = await page.screenshot(path=path)
    assert len(picture) < MAX_IMAGE_BYTES


async def film(page: Any, selector: str, path: Path, done: asyncio.Event) -> None:
    """Takes pictures of a part of the page until `done`, and writes them as an animation."""
    frames: list[Image.Image] = []
    durations: list[int] = []
    while not done.is_set():
        picture = Image.open(io.BytesIO(await page.locator(selector).screenshot())).convert("RGB")
        small = picture.resize((picture.width * 3 // 4, picture.height * 3 // 4), Image.Resampling.LANCZOS)
        frame = small.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        if frames and frame.size == frames[0].size and frame.tobytes() == frames[-1].tobytes():
            durations[-1] += FILM_MS
        elif not frames or frame.size == frames[0].size:
            frames.append(frame)
            durations.append(FILM_MS)
        await asyncio.sleep(FILM_MS / 1000)
    durations[-1] = 3000
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_memory_shows_who_holds_each_block(open_page, served, image, scheme):
    page = await open_page("memory", color_scheme=scheme, viewport=PICTURE)
    async with busy(served):
        await page.locator("#sequences .sequence").nth(8).wait_for()
        await page.locator("#events li").nth(3).wait_for()
        await page.locator("#gpu-blocks").hover(position={"x": 130, "y": 90})
        await page.locator("#block-title", has_text="Block").wait_for()
        await page.locator("#block-owners .token").first.wait_for()
        assert "of 16 hold tokens" in await page.locator("#block-facts").inner_text()
        await take(page, image(f"ui-memory-{scheme}"))
        # The gain by paging, and the block table of a sequence with its text: without a click.
        assert "Orca (Max)" in await page.locator("#gains").inner_text()
        await page.locator("#table-rows .token").nth(8).wait_for()


async def test_a_pause_keeps_the_picture_and_steps_go_back(open_page, served):
    page = await open_page("memory")
    async with busy(served, 8):
        await page.locator("#sequences .sequence").nth(4).wait_for()
        # By keyboard: the space bar pauses, the comma goes back.
        await page.locator("body").press("Space")
        await page.locator("#pause[aria-pressed='true']").wait_for()
        await page.locator("body").press("Comma")
        await page.locator("#age", has_text="s ago").wait_for()
        await page.locator("#moment").fill("0")
        await page.locator("#age", has_text="s ago").wait_for()
        await page.get_by_role("button", name="Go on").click()
        await page.locator("#age", has_text="live").wait_for()


async def test_an_example_is_told_slowly_and_pauses_by_itself_with_its_marks(open_page, image):
    page = await open_page("memory", viewport=PICTURE)
    await page.get_by_role("button", name="Run an example").click()
    told = page.locator("#told")
    sentences = ("One prompt, computed once", "is copied to", "Beams part ways", "Shortly before the end")
    await told.filter(has_text=sentences[0]).wait_for()
    moving = image("ui-example").with_suffix(".gif")
    done = asyncio.Event()
    filming = asyncio.create_task(film(page, ".pools", moving, done))
    for sentence in sentences[1:]:
        await told.filter(has_text=sentence).wait_for()
    done.set()
    await filming
    assert moving.stat().st_size < MAX_MOVING_BYTES
    # Texts that were read while it ran at full speed appear when it is shown again.
    assert await page.locator("#table-rows .token").count() > 8
    await page.locator("#pause[aria-pressed='true']").wait_for()
    await page.locator("#events summary", has_text="forks").first.wait_for()
    # Goes to a frame where a block was copied: the arrow stays, and so does the list.
    copied = """() => {
        const view = globalThis.quirePage.views.memory, { frames } = view.replica.history;
        view.goTo(frames.findLastIndex(({ happened }) => happened.some(({ text }) => text.startsWith("copy"))));
        document.querySelector("#events details").open = true;
        return view.held.frame.happened.at(-1).text;
    }"""
    text = await page.evaluate(copied)
    await page.locator("#events details[open] li", has_text=text).first.wait_for()
    assert await page.evaluate("() => globalThis.quirePage.views.memory.grids.gpu.marks.length") > 0
    # The picture is kept for longer than the frames.
    await page.evaluate("() => globalThis.quirePage.views.memory.replica.history.forget(Infinity)")
    await page.locator("#events details[open] li", has_text=text).first.wait_for()
    await page.get_by_role("button", name="Go on").click()
    assert await page.evaluate("() => globalThis.quirePage.views.memory.held") is None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            {"status": 429, "headers": {"retry-after": "2"}, "json": {"error": {"message": "too many"}}},
            "(try again in 2 s)",
        ),
        ({"status": 503, "body": "<html>a proxy</html>"}, "the gateway answers 503"),
        ({"body": 'data: {"choices": [{"index": 0, "delta": {"role": "assistant"}}]}\n\n'}, "the connection broke"),
    ],
)
async def test_a_chat_that_fails_says_so_and_can_be_asked_again(chromium, served, answer, said):
    page = await (await chromium.new_context()).new_page()
    await page.goto(f"http://{served.server.http_address}/ui/#chat")
    await page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    await page.locator("#prompt").fill("Tell me a story.")
    await page.locator("#send").click()
    await page.locator(".note.problem", has_text=said).wait_for()
    # The question is back in its input field, and the conversation does not contain it.
    assert await page.locator("#prompt").input_value() == "Tell me a story."
    assert await page.evaluate("() => globalThis.quirePage.views.chat.messages.length") == 0
    await page.unroute("**/v1/chat/completions")
    await page.locator("#send").click()
    await page.locator(".answer").first.wait_for()
    await page.context.close()


async def test_blocks_are_read_by_keyboard(open_page):
    page = await open_page("memory")
    await page.locator("#gpu-blocks").focus()
    await page.locator("#gpu-blocks").press("ArrowRight")
    await page.locator("#block-title", has_text="Block 1").wait_for()
    await page.locator("body").press("3")
    await page.locator("#load:not([hidden])").wait_for()
    await page.locator("#tab-load").press("ArrowRight")
    await page.locator("#chat:not([hidden])").wait_for()


async def test_load_shows_numbers_steps_and_why_requests_wait(open_page, served, image):
    page = await open_page("load", viewport=PICTURE)
    async with busy(served, 40):
        await page.locator("#waiting tbody tr").nth(2).wait_for()
        await page.locator("#steps tbody td", has_text="ms").first.wait_for()
        await page.locator("#replicas .good", has_text="ready").wait_for()
        # Rates are known after a second, times to the first token once a request has ended.
        await page.locator("#numbers dd", has_text="% below").wait_for()
        reasons = await page.locator("#waiting tbody td:last-child").all_inner_texts()
        assert any(each.startswith("it is next") for each in reasons)
        await page.wait_for_function("() => globalThis.quirePage.replica.series.samples.length >= 25")
        await take(page, image("ui-load"))


async def test_charts_of_a_page_that_was_just_opened_have_the_time_before(open_page, served):
    names = {"generated", "computed", "rows", "ttft50", "ttft95", "used"}
    page = await open_page("load")
    async with busy(served, 8), asyncio.timeout(60):
        found: set[str] = set()
        while found < names:
            await page.reload()
            await page.wait_for_function("() => globalThis.quirePage.replica?.series.samples.length")
            samples = await page.evaluate("() => globalThis.quirePage.replica.series.samples")
            # Samples that the page takes itself do not have "down".
            found = {name for name in names for each in samples if "down" in each and each.get(name)}


async def test_chat_streams_several_answers_with_probabilities(open_page, image):
    page = await open_page("chat", viewport=PICTURE)
    await page.locator("#field-n").fill("3")
    await page.locator("#field-temperature").fill("0.7")
    await page.locator("#field-seed").fill("7")
    await page.locator("#prompt").fill("Tell me a story about a fox.")
    await page.locator("#prompt").press("Enter")
    await page.locator("#stop[disabled]").wait_for()
    assert await page.locator(".answer").count() == 3
    assert "tokens/s" in await page.locator(".note").inner_text()
    await page.locator(".answer").nth(1).locator("button").click()
    assert "The chat goes on from here" in await page.locator(".answer.chosen").inner_text()
    await page.locator(".answer .token").nth(4).hover()
    await page.locator("#token-card li.chosen").wait_for()
    await take(page, image("ui-chat"))
    # By keyboard, too.
    await page.locator(".answer .token").first.focus()
    await page.keyboard.press("ArrowRight")
    await page.locator("#token-card:not([hidden])").wait_for()


async def test_an_answer_can_be_stopped_and_a_refusal_is_told(open_page, served):
    page = await open_page("chat")
    await page.locator("#field-max_tokens").fill("900")
    await page.locator("summary", has_text="Everything else").click()
    await page.locator("#field-ignore_eos").select_option("true")
    await page.locator("#prompt").fill("Count.")
    await page.locator("#send").click()
    await page.locator(".answer .token").nth(3).wait_for()
    await page.locator("#stop").click()
    await page.locator(".note", has_text="stopped").wait_for()

    async def nothing_runs() -> bool:
        return not (await served.state()).running_requests

    await until(nothing_runs)
    await page.locator("#field-stop").fill("no json")
    await page.locator("#prompt").fill("Again.")
    await page.locator("#send").click()
    await page.locator(".note.problem", has_text="stop is not JSON").wait_for()


async def test_a_chat_begins_with_a_click_and_outlives_a_reload(open_page):
    page = await open_page("chat")
    await page.get_by_role("button", name="What is the capital of France?").click()
    await page.locator("#stop[disabled]").wait_for()
    said = await page.locator(".answer .text").inner_text()
    await page.reload()
    assert await page.locator(".answer .text").inner_text() == said
    assert await page.locator("#suggestions").count() == 0
    await page.get_by_role("button", name="New chat").click()
    await page.locator("#suggestions").wait_for()


async def test_text_of_users_and_models_is_never_read_as_html(open_page):
    page = await open_page("chat")
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    await page.locator("#prompt").fill(evil)
    await page.locator("#send").click()
    await page.locator("#stop[disabled]").wait_for()
    assert await page.locator("article.user p").inner_text() == evil
    assert await page.locator("#conversation img, #conversation script").count() == 0


async def test_a_tool_is_called_and_its_result_goes_back(open_page):
    page = await open_page("chat")
    await page.locator("summary", has_text="Tools").click()
    await page.get_by_role("button", name="An example").click()
    await page.locator("#field-tool_choice").fill('"required"')
    await page.locator("#prompt").fill("What is the weather in Rome?")
    await page.locator("#send").click()
    await page.locator(".results textarea").first.wait_for()
    assert "weather(" in await page.locator(".calls pre").first.inner_text()
    await page.locator("#field-tool_choice").fill('"none"')
    await page.locator(".results textarea").first.fill('{"sky": "sunny"}')
    await page.get_by_role("button", name="Send results").click()
    await page.locator("article.assistant").nth(1).locator(".note", has_text="tokens").wait_for()


async def test_the_page_fits_a_phone(open_page, served, image):
    page = await open_page("memory", **PHONE)
    async with busy(served, 8):
        await page.locator("#sequences .sequence").nth(2).wait_for()
        await page.locator("#gpu-blocks").tap(position={"x": 60, "y": 40})
        await page.locator("#block-title", has_text="Block").wait_for()
        # Another tap deselects the sequence, so that all are seen in their colours.
        selected = "() => globalThis.quirePage.views.memory.selected"
        if await page.evaluate(selected) is not None:
            await page.locator("#gpu-blocks").tap(position={"x": 60, "y": 40})
        await take(page, image("ui-phone"))
    for view in ("chat", "memory", "load"):
        await page.locator(f"#tab-{view}").tap()
        width = await page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= PHONE["viewport"]["width"], f"{view} is {width} pixels wide"


@pytest.mark.parametrize("size", [(360, 740), (740, 360)])
async def test_on_a_phone_the_chat_fills_the_screen_and_follows_its_answer(open_page, size):
    width, height = size
    page = await open_page("chat", **PHONE | {"viewport": {"width": width, "height": height}})

    async def lower_edge() -> float:
        box = await page.locator("#compose").bounding_box()
        return box["y"] + box["height"]

    buttons = [await page.locator(f"#compose button >> nth={place}").bounding_box() for place in range(4)]
    assert len({box["y"] for box in buttons}) == 1
    assert height - 24 <= await lower_edge() <= height
    for _ in range(2):
        await page.locator("#compose textarea").fill("Tell me a story about a fox.")
        await page.get_by_role("button", name="Send").tap()
        await page.locator("#stop:disabled").wait_for()
    page_height = "() => document.documentElement.scrollHeight"
    assert await page.evaluate(page_height) > height
    scrolled = await page.evaluate("() => scrollY + innerHeight")
    assert scrolled > await page.evaluate(page_height) - 160
    assert height - 24 <= await lower_edge() <= height
    # The keyboard takes half of the screen.
    await page.set_viewport_size({"width": width, "height": height // 2})
    assert height // 2 - 24 <= await lower_edge() <= height // 2
    await page.get_by_role("button", name="Parameters").tap()
    await page.locator("#parameters summary").first.wait_for()


async def test_a_picture_of_16384_blocks_takes_few_operations(open_page):
    """256 sequences, drawn whole, which takes a few ms, since each block is about one operation of the canvas."""
    page = await open_page("memory")
    await page.wait_for_function("() => globalThis.quirePage.replica?.frame")
    operations = await page.evaluate(
        """async () => {
            const view = globalThis.quirePage.views.memory, { feed } = globalThis.quirePage;
            // It knows of no such replica.
            feed.close();
            view.fetchBlock = async () => null;
            const replica = feed.of("synthetic"), blocks = 16384, size = 16, count = 256, each = 60;
            const numbers = { ...view.replica.frame.numbers, num_blocks: blocks, block_size: size, num_host_blocks: 0 };
            const memory = { sequences: [], gone: [], progress: [], lengths: [], tables: [], named: [], names: [],
                             pins: [], events: [], lost_events: 0 };
            for (let number = 1; number <= count; number += 1) {
                memory.sequences.push({ number, request_id: `r${number}`, tenant: "", sequence_index: 0,
                                        num_sequences: 1, prompt_tokens: 9, max_tokens: 999, is_beam: false });
                memory.progress.push(number, 2, each * size - 3, each * size - 4);
                memory.lengths.push(number, each);
                for (let i = 0; i < each; i += 1) memory.tables.push(number, i, (number - 1) * each + i);
            }
            const frame = { is_whole: true, unix_seconds: 1, numbers, memory, steps: [], answers: [], waiting: [],
                            ended: [] };
            replica.add(frame);
            globalThis.quirePage.choose("synthetic");
            await new Promise((done) => requestAnimationFrame(done));
            const context = CanvasRenderingContext2D.prototype;
            let operations = 0;
            for (const name of Object.getOwnPropertyNames(context)) {
                const { value } = Object.getOwnPropertyDescriptor(context, name);
                if (typeof value !== "function") continue;
                context[name] = function (...given) { operations += 1; return value.apply(this, given); };
            }
            view.isDirty = true;
            view.draw();
            return operations;
        }"""
    )
    assert 256 * 60 <= operations < 2 * 16384
