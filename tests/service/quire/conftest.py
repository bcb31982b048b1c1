"""Fixtures of the client's tests."""

from collections.abc import Iterator

import pytest

from tests.support.fake_gateway import FakeGatewayThread, running_fake_gateway


@pytest.fixture
def gateway() -> Iterator[FakeGatewayThread]:
    with running_fake_gateway() as gateway:
        yield gateway
