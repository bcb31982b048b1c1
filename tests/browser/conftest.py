"""A server of the embedded model, and pages of a headless Chromium. `make test-ui` sets the path of Chromium; without
it no test here is collected, since the browser is no part of the tiers."""

import importlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.serving import Served, serving

CHROMIUM = os.environ.get("QUIRE_CHROMIUM")
collect_ignore_glob = [] if CHROMIUM else ["test_*.py"]
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"

OpenPage = Callable[..., Awaitable[Any]]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served() -> AsyncIterator[Served]:
    async with serving(num_gpu_blocks=240, swap_space=1 << 20, max_num_seqs=32) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Any]:
    # Only `make test-ui` installs it.
    driver: Any = importlib.import_module("playwright.async_api")
    async with driver.async_playwright() as playwright:
        # Without its sandbox, since tests run as root in containers. It only opens our page.
        arguments = ["--no-sandbox", "--disable-gpu", "--no-zygote", "--font-render-hinting=none"]
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def open_page(served: Served, chromium: Any) -> AsyncIterator[OpenPage]:
    """Opens a view of the page. At the end of the test no script may have failed, and no request been refused."""
    problems: list[str] = []
    contexts: list[Any] = []

    async def open_one(view: str, **options: Any) -> Any:
        context = await chromium.new_context(**({"viewport": {"width": 1280, "height": 800}} | options))
        contexts.append(context)
        page = await context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        await page.goto(f"http://{served.server.http_address}/ui/#{view}")
        await page.locator('#connection[data-state="connected"]').wait_for()
        return page

    yield open_one
    for context in contexts:
        await context.close()
    assert problems == []


@pytest.fixture
def image() -> Callable[[str], Path]:
    """The path of a picture in the documents."""
    return lambda name: IMAGES / f"{name}.png"
