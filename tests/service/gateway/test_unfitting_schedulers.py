"""Schedulers of other versions, or with another model, together with and before ones that fit."""

from quire.rpc.errors import Unavailable
from quire.service.compatibility import SCHEDULER_PROTOCOL, ModelFingerprint, ProtocolVersions
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import error_of, running_gateway, stream_request
from tests.support.scheduler_process import until


async def test_a_scheduler_of_other_versions_or_another_model_is_not_used_and_ready_says_why(caplog):
    """The gateway refuses both by their welcome, as if the scheduler did not check the gateway's hello."""
    async with (
        FakeScheduler(protocol=ProtocolVersions(8, 9), checks_hello=False) as newer,
        FakeScheduler(model=ModelFingerprint(tokenizer="0123456789abcdef"), checks_hello=False) as other,
        FakeScheduler(architecture="GPT2LMHeadModel") as third,
        running_gateway(newer, other, third, connect_timeout=0.5) as gateway,
    ):
        assert isinstance(await error_of(gateway.generation.GenerateStream(stream_request("hello"))), Unavailable)

        async def reason_of_all() -> str | None:
            said = (await gateway.http.get("/ready")).json()["reason"]
            parts = ("speaks versions", "different models", "GPT2LMHeadModel")
            return said if all(each in said for each in parts) else None

        reason = await until(reason_of_all)
        ours = f"this gateway {SCHEDULER_PROTOCOL}"
        assert f"the scheduler speaks versions 8 to 9 of quire.scheduler.v1, {ours}" in reason
        assert "have different models: tokenizer" in reason
        assert reason.count("give both the same one by --model") == 1
        # It tries again and again, but logs the refusal once.
        connections = newer.connections
        await newer.until(lambda: newer.connections > connections + 2)
    lines = [record.getMessage() for record in caplog.records if "quire.scheduler.v1" in record.getMessage()]
    assert len(lines) == 1
