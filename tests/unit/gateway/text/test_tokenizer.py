"""A model directory's tokenizer returns what transformers' AutoTokenizer returns; long work runs in a thread."""

import asyncio
import json
import string
from contextlib import suppress
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from gateway.auth.caller import Access, Caller, set_caller
from gateway.auth.quota import Account, Limits
from gateway.offload import FairExecutor
from gateway.request.served_model import ServedModel
from gateway.text.tokenizer import Tokenizer
from gateway.types import ChatMessage, ChatPrompt
from quire.constraints.tokens import TokenTable
from quire.gateway.v1.generation_pb2 import TOOL_CHOICE_MODE_NONE, Tool, ToolChoice
from quire.model_files.model_directory import ModelDirectory
from quire.rpc.errors import InvalidArgument
from quire.runtime.settings import ConfigurationError
from tests.support.tokenizers import BOS, EOS, byte_fallback, byte_level, wrapped, write_model_directory

TEXTS = [
    "hello world",
    "",
    " the cat <s>sat</s> on <x> the mat",
    "<|im_start|>user\nhello<|im_end|> <extra> <own>",
    "it 's a cat . is n't it ? we 've ' quoted ' , they 're",
    "naïve café 😀 <pad><unk>[UNK]",
]


def word_piece() -> tokenizers.Tokenizer:
    """BERT's kind, which writes a space before each word even if the text had none."""
    words = ["[UNK]", BOS, EOS, "the", "cat", "sat", "on", "mat", "it", "is", "hello", "world", "we", "they", "quoted"]
    words += [*".?!,'ntsvemr", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """T5's kind, whose words begin with "▁"."""
    pieces = ["▁", "▁the", "▁cat", "sat", "▁on", "▁mat", "hello", "▁is", *string.ascii_letters, *".?!,'<>|_\n"]
    vocabulary = [
        (BOS, 0.0),
        (EOS, 0.0),
        ("<unk>", 0.0),
        *((piece, -float(place)) for place, piece in enumerate(pieces, 1)),
    ]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def token(content: str, **flags: bool) -> dict:
    """A token as transformers writes it to tokenizer_config.json."""
    fields = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content} | fields | flags


TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "word_piece": word_piece, "unigram": unigram}
IM = {"400": token("<|im_start|>"), "401": token("<|im_end|>", rstrip=True)}
CONFIGS = {
    "empty": {},
    "named": {"bos_token": BOS, "eos_token": EOS},
    "named, not in the vocabulary": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<pad>"},
    "bos is not wanted": {"bos_token": BOS, "eos_token": EOS, "add_bos_token": False},
    "eos is wanted": {"bos_token": BOS, "eos_token": EOS, "add_bos_token": True, "add_eos_token": True},
    "listed": {"added_tokens_decoder": IM, "eos_token": "<|im_end|>"},
    "listed, and named": {"added_tokens_decoder": {"9": token("<x>", special=False)}, "eos_token": "<x>"},
    "listed otherwise than in the file": {"added_tokens_decoder": {"1": token(EOS, lstrip=True, rstrip=True)}},
    "extra": {"extra_special_tokens": ["<extra>", "<x>"]},
    "additional": {"additional_special_tokens": ["<extra>"], "added_tokens_decoder": IM},
    "extra, and listed as no special token": {
        "added_tokens_decoder": {"9": token("<x>", special=False)},
        "additional_special_tokens": ["<x>", "<extra>"],
    },
    "extra by name": {"extra_special_tokens": {"own_token": "<own>", "image_token": "<x>"}},
    "of this model": {"own_token": "<own>", "model_max_length": 3},
    "clean": {"clean_up_tokenization_spaces": True},
    "split": {"split_special_tokens": True, "eos_token": EOS},
    "truncating": {"model_max_length": 2, "truncation_side": "left"},
}
LEGACY = {
    "special_tokens_map": {"special_tokens_map": {"bos_token": "<x>", "eos_token": token("<|im_end|>")}},
    "over the configuration": {
        "tokenizer_config": {"eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"},
        "special_tokens_map": {"eos_token": "<x>"},
    },
    "added_tokens": {
        "added_tokens": {"<extra>": 600, "<x>": 599, "hello": 3},
        "special_tokens_map": {"eos_token": "<x>"},
    },
}


class CountingExecutor(FairExecutor):
    """Notes for which tenants it is given work."""

    def __init__(self, num_threads):
        super().__init__(num_threads)
        self.tenants = []

    async def run(self, tenant, num_bytes, function, *arguments):
        self.tenants.append(tenant)
        return await super().run(tenant, num_bytes, function, *arguments)


@pytest.fixture
def executor():
    pool = CountingExecutor(1)
    yield pool
    pool.shutdown()


def written(folder, tokenizer: tokenizers.Tokenizer, **files: object):
    """A model directory with such JSON files."""
    texts = {f"{name}__json": json.dumps(content) for name, content in files.items()}
    return write_model_directory(folder / "model", tokenizer, **texts)


async def assert_alike(directory, executor) -> None:
    ours, theirs = ServedModel.open(directory, None, executor).tokenizer, AutoTokenizer.from_pretrained(directory)
    assert ours.size == max(theirs.get_vocab().values()) + 1
    with suppress(ValueError):  # WordPiece, which constraints do not read
        files = ModelDirectory.open(directory)
        table = TokenTable.of(files.tokenizer(), files.tokenizer_config)
        assert (len(table.token_bytes), table.special_tokens) == (ours.size, ours.special_tokens)
    for text in TEXTS:
        for special in (True, False):
            token_ids = await ours.encode(text, add_special_tokens=special)
            assert token_ids == theirs.encode(text, add_special_tokens=special), (text, special)
        for kept in (True, False):
            expected = theirs.decode(token_ids, skip_special_tokens=not kept)
            assert ours.decode(token_ids, include_special_tokens=kept) == expected
            pieces = ours.detokenizer(include_special_tokens=kept)
            assert "".join([*map(pieces.push, token_ids), pieces.flush()]) == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("kind", TOKENIZERS)
async def test_tokens_and_texts_are_those_of_transformers(tmp_path, executor, kind, config):
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    await assert_alike(written(tmp_path, TOKENIZERS[kind](), tokenizer_config=config), executor)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("files", LEGACY.values(), ids=LEGACY.keys())
@pytest.mark.parametrize("kind", TOKENIZERS)
async def test_older_files_are_read_as_transformers_reads_them(tmp_path, executor, kind, files):
    files = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"}} | files
    await assert_alike(written(tmp_path, TOKENIZERS[kind](), **files), executor)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", ["tokenizer_config", "files"])
async def test_tools_have_a_template_of_their_own_as_in_transformers(tmp_path, executor, place):
    sources = {
        "default": "no tools: {{ messages[0].content }}",
        "tool_use": "{{ tools[0].function.name }}<tool_call>\n{",
    }
    named = [{"name": name, "template": source} for name, source in sources.items()]
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({} if place == "files" else {"chat_template": named})
    directory = written(tmp_path, byte_level(), tokenizer_config=config)
    if place == "files":
        (directory / "chat_template.jinja").write_text(sources["default"])
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "tool_use.jinja").write_text(sources["tool_use"])
    theirs = AutoTokenizer.from_pretrained(directory)
    chat = ServedModel.open(directory, None, executor).chat
    messages = [ChatMessage("user", "hello")]
    assert chat.tool_format == "hermes"
    for tools in ([], [Tool(name="now")]):
        described = [{"type": "function", "function": {"name": each.name}} for each in tools] or None
        expected = theirs.apply_chat_template([{"role": "user", "content": "hello"}], tools=described, tokenize=False)
        assert await chat.render(ChatPrompt(messages, tools=tools)) == expected
    no_choice = ChatPrompt(messages, tools=[Tool(name="now")], tool_choice=ToolChoice(mode=TOOL_CHOICE_MODE_NONE))
    assert await chat.render(no_choice) == "no tools: hello"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"added_tokens_decoder": ["<x>"]}, "added_tokens_decoder in tokenizer_config.json"),
        ({"added_tokens_decoder": {"x": "<x>"}}, "added_tokens_decoder in tokenizer_config.json"),
        ({"added_tokens_decoder": {"5": {"id": 7}}}, r"added_tokens_decoder\[5\] .* not a token"),
        ({"extra_special_tokens": ["<x>", 7]}, r"extra_special_tokens\[1\] in tokenizer_config.json is 7, not a token"),
        ({"bos_token": 7}, "bos_token in tokenizer_config.json is 7, not a token"),
    ],
)
def test_what_is_no_token_is_a_configuration_error(tmp_path, executor, config, says):
    with pytest.raises(ConfigurationError, match=says):
        ServedModel.open(written(tmp_path, byte_level(), tokenizer_config=config), None, executor)


TEXT = "the cat sat on the mat, hello world 😀 "


@pytest.mark.parametrize(("repeats", "num_threaded"), [(0, 0), (1, 0), (2000, 2)])
@pytest.mark.parametrize("include_special_tokens", [False, True])
async def test_long_texts_and_many_tokens_go_to_a_thread(executor, repeats, num_threaded, include_special_tokens):
    tokenizer = wrapped(byte_level(), executor)
    text = TEXT * repeats
    token_ids = await tokenizer.encode(text, add_special_tokens=True)
    assert token_ids == byte_level().encode(text).ids
    decoded = await tokenizer.decode_any(token_ids, include_special_tokens=include_special_tokens)
    assert decoded == ("<s>" if include_special_tokens else "") + text
    assert len(executor.tenants) == num_threaded


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte level", "byte fallback"])
async def test_no_text_has_more_bytes_than_its_tokens_may_spell(tokenizer):
    gateway_tokenizer = wrapped(tokenizer)
    for text in ("the cat " * 50, "hello there" * 20, "你好世界😀" * 30, "</s>" * 40, "    " * 40):
        num_tokens = len(await gateway_tokenizer.encode(text, add_special_tokens=False))
        assert len(text.encode()) <= num_tokens * gateway_tokenizer.longest_token_bytes


def test_a_token_id_beyond_all_vocabularies_takes_no_memory() -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0, "b": (1 << 32) - 1}, []))
    with pytest.raises(ConfigurationError, match="the tokenizer has the token id 4294967295; at most 4194303 are"):
        Tokenizer(tokenizer, FairExecutor(1))


@pytest.mark.parametrize("repeats", [1, 2000])
async def test_a_text_that_a_vocabulary_without_an_unknown_token_cannot_spell_is_the_callers_error(repeats):
    tokenizer = wrapped(tokenizers.Tokenizer(models.WordPiece({"the": 0, "##s": 1}, unk_token="[UNK]")))
    assert await tokenizer.encode("thes", add_special_tokens=False) == [0, 1]
    with pytest.raises(InvalidArgument, match=r"tokenizer cannot encode this text: .* Missing \[UNK\] token"):
        await tokenizer.encode("cat" * repeats, add_special_tokens=False)
    with pytest.raises(InvalidArgument, match="tokenizer cannot encode this text"):
        await tokenizer.encode_pair("the" * repeats, "cat" * repeats)


class PanicException(BaseException):
    """As the library raises it: its class has no public name."""


async def test_a_panic_of_the_library_ends_the_request_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object, **__: object) -> str:
        raise PanicException("byte index 1 is out of range")

    tokenizer = wrapped(byte_level())
    library = SimpleNamespace(decode=panic, decode_batch=panic)
    monkeypatch.setattr(tokenizer, "_tokenizer", library)
    for token_ids in ([1], [1] * 5000):
        with pytest.raises(RuntimeError, match="tokenizer cannot decode these tokens: byte index 1"):
            await tokenizer.decode_any(token_ids, include_special_tokens=True)


async def test_truncation_of_the_tokenizer_file_is_not_applied():
    tokenizer = type(byte_level()).from_str(byte_level().to_str())
    whole = tokenizer.encode("a b c d e f g h", add_special_tokens=False).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    assert await wrapped(tokenizer).encode("a b c d e f g h", add_special_tokens=False) == whole


async def test_long_work_is_that_of_the_callers_tenant(executor):
    tokenizer = wrapped(byte_level(), executor)

    async def encode(tenant: str | None) -> None:
        if tenant is not None:
            set_caller(Caller(tenant, Access(), Account(Limits(), lambda: 0.0)))
        await tokenizer.encode("the cat " * 1000, add_special_tokens=False)

    for tenant in ("acme", "other", None):
        await asyncio.create_task(encode(tenant))
    assert executor.tenants == ["acme", "other", "default"]
