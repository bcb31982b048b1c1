"""The choice of a model by name, kind and key."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.auth.caller import Access, Caller, anyone, set_caller
from gateway.request.adapter_names import Adapters
from gateway.request.models import Models
from gateway.types import ModelKind
from quire.rpc.errors import InvalidArgument, NotFound, Unavailable, Unimplemented
from quire.runtime.settings import ConfigurationError

TEXT, VECTORS, SCORES = ModelKind.TEXT, ModelKind.VECTORS, ModelKind.SCORES


@pytest.fixture(autouse=True)
def _caller() -> Iterator[None]:
    set_caller(anyone())
    yield
    set_caller(anyone())


def make_generator(name: str, kind: ModelKind, *aliases: str, ids: tuple[str, ...] = (), error: Any = None) -> Any:
    """A generator that has the requests `ids`, or whose schedulers fail by `error`."""

    async def cancel(request_id: str) -> None:
        if error is not None:
            raise error
        if request_id not in ids:
            raise NotFound(request_id)

    async def find_durable(tenant: str, request_id: str) -> None:
        await cancel(request_id)

    calls = SimpleNamespace(find_durable=find_durable)
    return SimpleNamespace(
        model=SimpleNamespace(name=name, kind=kind),
        adapters=Adapters(name, Path("/m"), list, aliases=aliases),
        replicas=SimpleNamespace(links={}, calls=calls),
        cancel=cancel,
        holds=lambda tenant, request_id: False,
    )


def make_models(*generators: Any) -> Models:
    return Models(cast(Any, generators))


def allow(*models: str) -> None:
    everyone = anyone()
    set_caller(Caller(everyone.tenant, Access(models=frozenset(models)), everyone.account))


CHAT, OTHER = make_generator("chat", TEXT, "gpt"), make_generator("other", TEXT)
VECTORS_A, VECTORS_B = make_generator("a", VECTORS), make_generator("b", VECTORS)
ALL = make_models(CHAT, OTHER, VECTORS_A, VECTORS_B)


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        (None, None, CHAT),
        (None, TEXT, CHAT),
        ("", TEXT, CHAT),
        (None, VECTORS, VECTORS_A),
        # No model ranks: the generator of the first one refuses it.
        (None, SCORES, CHAT),
        ("gpt", TEXT, CHAT),
        ("other", TEXT, OTHER),
        ("other", None, OTHER),
        ("b", VECTORS, VECTORS_B),
        ("b", None, VECTORS_B),
        ("b", SCORES, VECTORS_B),
    ],
)
def test_a_call_goes_to_the_named_model_or_to_the_first_of_its_kind(
    name: str | None, kind: ModelKind | None, found: Any
) -> None:
    assert ALL.of(name, kind) is found


def test_the_only_model_gets_every_call_and_refuses_it_by_itself() -> None:
    alone = make_models(VECTORS_A)
    assert alone.of("anything", TEXT) is alone.of(None) is VECTORS_A
    with pytest.raises(NotFound, match=r'the model served here is "a"'):
        alone.named("anything")


def test_names_and_kinds_that_do_not_fit_are_refused_with_what_would() -> None:
    with pytest.raises(InvalidArgument, match=r'is "x"; the models served here are "chat", "gpt", "other", "a", "b"$'):
        ALL.of("x", TEXT)
    with pytest.raises(Unimplemented, match=r'model "gpt" generates text; "a" gives embeddings') as refused:
        ALL.of("gpt", VECTORS)
    assert refused.value.reason == "WRONG_KIND_OF_MODEL"
    many = make_models(*(make_generator(f"m{number}", TEXT) for number in range(11)))
    with pytest.raises(NotFound, match=r'"m7", 3 others$'):
        many.named("x")


def test_models_that_a_key_may_not_use_are_not_there() -> None:
    allow("other", "b")
    assert ALL.of(None, TEXT) is OTHER
    assert ALL.of(None, VECTORS) is VECTORS_B
    assert ALL.names(Caller("t", Access(models=frozenset({"b"})), anyone().account)) == ["b"]
    with pytest.raises(InvalidArgument, match=r'is "chat"; the models served here are "other", "b"$'):
        ALL.of("chat", TEXT)
    with pytest.raises(Unimplemented, match=r'"other" generates text'):
        ALL.of("b", TEXT)
    allow()
    with pytest.raises(NotFound, match="no model is served here that this API key may use"):
        ALL.named("chat")
    assert ALL.of(None, TEXT) is CHAT


def test_a_name_of_two_models_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r'the name "gpt" is of the models chat and gpt'):
        make_models(CHAT, make_generator("gpt", VECTORS))


async def test_a_request_id_is_sought_at_all_models() -> None:
    holder = make_generator("holder", TEXT, ids=("r",))
    both = make_models(CHAT, holder, VECTORS_A)
    assert await both.holding("r") is holder
    await both.cancel("r")
    for ask in (both.holding, both.cancel):
        with pytest.raises(NotFound):
            await ask("s")
    # A replica that does not answer may have it.
    lost = make_models(make_generator("lost", TEXT, error=Unavailable("gone")), CHAT)
    with pytest.raises(Unavailable):
        await lost.cancel("r")
    assert await make_models(*lost, holder).holding("r") is holder
