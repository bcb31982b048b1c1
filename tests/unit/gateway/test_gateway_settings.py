"""The gateway's flags are refused at start where its schedulers would refuse what follows from them."""

import pytest

from gateway.settings import GatewaySettings
from quire.settings import ConfigurationError, load_settings


def load(*argv: str) -> GatewaySettings:
    return load_settings(GatewaySettings, argv, {}, program="quire gateway")


def test_the_longest_grace_is_what_schedulers_take():
    assert load("--reconnect-grace=600").reconnect_grace == 600
    with pytest.raises(ConfigurationError, match=r"--reconnect-grace.*the greatest value is 600"):
        load("--reconnect-grace=600.001")
