"""The page in front of two live replicas: one is killed and comes back, the gateway is restarted, one replica goes."""

import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.replicas.members import Resolver
from quire.rpc.address import DnsName
from quire.testing import free_port
from tests.support.gateway_process import running_gateway
from tests.support.serving import Served, serving

NAME = "dns:///replicas.test:50052"
PROMPT = "Once upon a time there was a fox who lived in a wood. "


class Dns:
    """Answers with the schedulers of these servers."""

    def __init__(self, *servers: Served) -> None:
        self.servers = list(servers)

    async def __call__(self, name: DnsName) -> list[str]:
        return [each.server.scheduler_address for each in self.servers]


@pytest_asyncio.fixture(loop_scope="session")
async def two() -> AsyncIterator[tuple[Served, Served]]:
    async with contextlib.AsyncExitStack() as stack:
        settings = {"num_gpu_blocks": 128, "num_threads": 1, "dtype": "float32"}
        one = await stack.enter_async_context(serving(**settings))
        yield one, await stack.enter_async_context(serving(**settings))


@pytest_asyncio.fixture(loop_scope="session")
async def page(chromium: Any) -> AsyncIterator[Any]:
    """A page whose scripts may not fail. Requests may, while there is no gateway."""
    failures: list[str] = []
    context = await chromium.new_context(viewport={"width": 1280, "height": 800})
    page = await context.new_page()
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: failures.append(str(error)))
    yield page
    await context.close()
    assert failures == []


async def generate(url: str, prompt: str, **fields: Any) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True} | fields
        (await http.post("/v1/completions", json=body)).raise_for_status()


async def test_two_replicas_that_are_killed_restarted_and_removed(page, two):
    one, other = two
    dns, port = Dns(one, other), free_port()
    settings = {"schedulers": (NAME,), "routing": "round-robin", "resolver": Resolver(dns, 0.1), "http_port": port}
    row = page.locator("#replicas tbody tr")
    async with running_gateway(**settings) as gateway:
        await page.goto(f"{gateway.http_url}/ui/#load")
        await row.locator("td.good").nth(1).wait_for()
        addresses = [each.server.scheduler_address for each in two]
        assert await row.locator("th").all_inner_texts() == sorted(addresses)
        row_of_one = row.filter(has_text=addresses[0])
        for number in range(4):
            await generate(gateway.http_url, PROMPT + f"Number {number}.")
        # Each replica has its own blocks.
        await page.locator("#tab-memory").click()
        choice = page.locator("#replica")
        for each in two:
            await choice.select_option(each.server.scheduler_address)
            await page.wait_for_function("() => globalThis.quirePage.views.memory.memory?.names.some(Boolean)")
            assert await page.locator("#block-title").inner_text() == "Point at a block"
            await page.locator("#gpu-blocks").hover(position={"x": 30, "y": 30})
            await page.locator("#block-title", has_text="Block").wait_for()
        # The choice stays while the other replica is away and comes back.
        await page.locator("#tab-load").click()
        os.kill(one.server.services["worker"], signal.SIGSTOP)
        await one.kill("scheduler")
        await row_of_one.locator("td.bad", has_text="not connected").wait_for()
        assert await choice.input_value() == other.server.scheduler_address
        await one.kill("worker")
        await row_of_one.locator("td.good").wait_for()
        await generate(gateway.http_url, PROMPT)
        # The page says which part of the chosen replica is down, and marks it when it is back.
        await choice.select_option(addresses[0])
        await one.kill("worker")
        await page.locator("#outage.bad", has_text="The worker is down").wait_for()
        assert await page.locator("#connection").inner_text() == "worker down"
        await page.locator("#outage.good", has_text="and is back").wait_for()
        await page.locator('#connection[data-state="connected"]').wait_for()
        await page.locator("#tab-memory").click()
        await page.locator("#marks .bad").first.wait_for(state="attached")
        await page.locator("#tab-load").click()
    await page.locator('#connection[data-state="lost"]').wait_for()
    # The gateway is back, but the replica that the page shows is gone.
    dns.servers.remove(other)
    async with running_gateway(**settings):
        await page.locator('#connection[data-state="connected"]').wait_for()
        await page.wait_for_function("() => globalThis.quirePage.feed.replicas.size === 1")
        await page.locator("#replica-choice").wait_for(state="hidden")
        assert await row.count() == 1
        address = await page.evaluate("() => globalThis.quirePage.replica.address")
        assert address == one.server.scheduler_address
        # A new replica is listed without a reload.
        dns.servers.append(other)
        await row.locator("td.good").nth(1).wait_for()


async def test_a_page_that_nobody_sees_is_watched_by_nobody(page, two):
    one, _ = two
    async with running_gateway(schedulers=(one.server.scheduler_address,)) as gateway:
        await page.clock.install()
        await page.goto(f"{gateway.http_url}/ui/#load")
        await page.locator('#connection[data-state="connected"]').wait_for()
        hide = """(isHidden) => {
            Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
        await page.evaluate(hide, True)
        await page.clock.fast_forward(31_000)
        assert await page.evaluate("() => globalThis.quirePage.feed.source === null")
        await page.evaluate(hide, False)
        assert await page.evaluate("() => globalThis.quirePage.feed.source !== null")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
async def test_the_load_view_shows_roles_tiers_and_what_moved(chromium, tmp_path, scheme, width):
    settings = {"num_gpu_blocks": 128, "num_threads": 1, "dtype": "float32", "swap_space": 1 << 20}
    async with contextlib.AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(serving(role=role, kv_disk=tmp_path / role, **settings))
            for role in ("prefill", "decode")
        ]
        schedulers = (one.server.scheduler_address, other.server.scheduler_address)
        gateway = await stack.enter_async_context(running_gateway(schedulers=schedulers, long_prompt=64))
        page = await chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        stack.push_async_callback(page.close)
        page.set_default_timeout(60_000)
        await page.goto(f"{gateway.http_url}/ui/#load")
        rows = page.locator("#replicas tbody tr")
        await rows.filter(has_text="prefill").filter(has_text="ready").wait_for()
        await rows.filter(has_text="decode").filter(has_text="ready").wait_for()
        for number in range(3):
            await generate(gateway.http_url, f"{number}: {PROMPT * 6}")
        tiers = page.locator("#tiers tbody tr")
        await tiers.filter(has_text=re.compile(r"host\d")).nth(1).wait_for()
        await tiers.filter(has_text=re.compile(r"disk\d")).nth(1).wait_for()
        moves = page.locator("#moves tbody tr")
        for row, column in ((0, 5), (1, 4)):
            await moves.nth(row).locator("td").nth(column).filter(has_text="3").wait_for()
        # On a phone tables scroll, and the page does not.
        assert await page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        await page.locator("#tiers").scroll_into_view_if_needed()
        if folder := os.environ.get("QUIRE_PICTURES"):
            await page.screenshot(path=f"{folder}/tiers-{scheme}-{width}.png", full_page=True)
