"""Which tokens a text may be made of."""

import json
import random
import re
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from quire.common.v1.common_pb2 import Choice, Constraint, StructuralTag, StructuralTags
from quire.constraints.check_process import check
from quire.constraints.matcher import Template, Vocabulary
from quire.constraints.tokens import TokenTable
from tests.support.constraints import TOKENIZERS, make_vocabulary, vocabulary, write
from tests.support.tokenizers import EOS, byte_level, id_of

each_kind = pytest.mark.parametrize("kind", TOKENIZERS)
THINKING = "<think>hm</think>"


@cache
def added() -> Tokenizer:
    """With added tokens that are not special, as Qwen and Gemma have them, and special ones in the middle of a text."""
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    texts = ["<think>", "</think>", "<tool_call>", "</tool_call>", "\n\n", "<b>"]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in texts])
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@cache
def held() -> Vocabulary:
    return make_vocabulary(added())


def walks(constraint: Constraint, over: Vocabulary) -> list[list[int]]:
    """Texts of a constraint, whose tokens are drawn from its masks; each of them ends."""
    template = Template.of(constraint, over)
    drawn = [
        write(template, choose, max_tokens=200)
        for choose in (min, max, *(random.Random(seed).choice for seed in (1, 2)))
    ]
    assert all(has_ended for _, has_ended in drawn)
    return [token_ids for token_ids, _ in drawn]


def text_of(token_ids: list[int], over: Vocabulary) -> str:
    return b"".join(over.token_bytes[each] for each in token_ids).decode()


@each_kind
def test_tokens_have_the_bytes_that_the_decoder_makes_of_them(kind) -> None:
    tokenizer, token_bytes = TOKENIZERS[kind](), vocabulary(kind).token_bytes
    anchor = id_of(tokenizer, "a")
    before = tokenizer.decode([anchor], skip_special_tokens=False)
    for token_id, data in enumerate(token_bytes):
        text = tokenizer.decode([anchor, token_id], skip_special_tokens=False).removeprefix(before)
        assert "\N{REPLACEMENT CHARACTER}" in text or data.decode() == text


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint(choice=Choice(texts=[THINKING])), THINKING),
        (Constraint(choice=Choice(texts=[f"a {THINKING}\n\n<b>", "<c>"])), rf"a {THINKING}\n\n<b>|<c>"),
        (Constraint(json_schema=json.dumps({"const": THINKING})), f'"{THINKING}"'),
        (Constraint(json_schema=json.dumps({"enum": ["<b>", "<|im_end|>"]})), r'"(<b>|<\|im_end\|>)"'),
        (Constraint(regex="(<think>|<b>)[0-9]"), "(<think>|<b>)[0-9]"),
        (Constraint(lark='start: "<tool_call>" /[a-c]/ "</tool_call>"'), "<tool_call>[a-c]</tool_call>"),
        (Constraint(choice=Choice(texts=["x<|im_end|></s>y"])), r"x<\|im_end\|></s>y"),
        (Constraint(choice=Choice(texts=["e\u0301"])), "e\u0301"),
    ],
    ids=str,
)
def test_texts_that_read_like_added_tokens_are_written_to_their_end(constraint, expected) -> None:
    special = held().special_tokens.values()
    for token_ids in walks(constraint, held()):
        assert re.fullmatch(expected, text_of(token_ids, held()))
        assert not set(special).intersection(token_ids)


def test_an_added_token_that_is_not_special_and_its_spelling_are_alternatives() -> None:
    constraint = Constraint(choice=Choice(texts=["a<think>b", "a<b>", "ac"]))
    template, think = Template.of(constraint, held()), held().text_tokens["<think>"]
    written = [write(template, random.Random(seed).choice, max_tokens=50)[0] for seed in range(40)]
    assert {think in each for each in written if text_of(each, held()) == "a<think>b"} == {True, False}


def test_a_forced_text_has_the_tokens_that_the_tokenizer_makes_of_it() -> None:
    text = f"the cat {THINKING}\n\n"
    expected = added().encode(text, add_special_tokens=False).ids
    assert walks(Constraint(choice=Choice(texts=[text])), held()) == [expected] * 4
    matcher = Template.of(Constraint(choice=Choice(texts=[text])), held()).matcher(tuple(held().eos))
    assert matcher.forced()[:4] == expected[:4]


def test_lark_names_added_tokens_of_every_flag_outside_texts_and_comments() -> None:
    lark = 'start: <think> "<b>" /<b>[c]/ </think> <|im_end|> // <think>\n# "<b>\n'
    ids = {**held().text_tokens, **held().special_tokens}
    for token_ids in walks(Constraint(lark=lark), held()):
        assert text_of(token_ids, held()) == "<think><b><b>c</think><|im_end|>"
        assert {ids[each] for each in ("<think>", "</think>", "<|im_end|>")} < set(token_ids)
    tag = StructuralTag(begin="<tool_call>", lark="start: <b>", end="</tool_call>")
    tags = StructuralTags(tags=[tag], required=True, no_free_text=True, single=True)
    for token_ids in walks(Constraint(structural_tags=tags), held()):
        assert text_of(token_ids, held()) == "<tool_call><b></tool_call>"


@pytest.mark.parametrize("spell", [True, False])
def test_marks_in_free_text_are_recognised_whatever_tokens_spell_them(spell) -> None:
    tag = StructuralTag(begin="<tool_call>", regex="[ab]", end="</tool_call>")
    matcher = Template.of(Constraint(structural_tags=StructuralTags(tags=[tag])), held()).matcher(tuple(held().eos))
    begin = [held().token_bytes.index(bytes([byte])) for byte in b"<tool_call>"]
    for token_id in begin if spell else [held().text_tokens["<tool_call>"]]:
        matcher.consume(token_id)
    assert matcher.needs_grammar is not None
    for token_id in (held().token_bytes.index(b"a"), held().text_tokens["</tool_call>"]):
        matcher.consume(token_id)
    assert matcher.error is None
    assert matcher.may_end


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_a_character_that_the_tokenizer_writes_as_another_one_is_spelled_in_bytes(kind) -> None:
    for token_ids in walks(Constraint(choice=Choice(texts=["the▁cat 名前"])), vocabulary(kind)):
        assert text_of(token_ids, vocabulary(kind)) == "the▁cat 名前"


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (Constraint(choice=Choice(texts=["abcdefghijklmnopqrstuvwxyz", "a▁b"])), "choice.texts[1]"),
        (Constraint(regex="a+▁"), "regex"),
        (Constraint(lark='start: "a▁"'), "lark"),
        (Constraint(json_schema='{"properties": {"a": {"anyOf": [{"const": ["▁"]}]}}}'), "json_schema"),
        (Constraint(json_schema='{"properties": {"a▁": {}}}'), "json_schema"),
        (
            Constraint(structural_tags=StructuralTags(tags=[StructuralTag(begin="<", regex="▁", end=">")])),
            "structural_tags.tags[0].regex",
        ),
    ],
    ids=str,
)
def test_a_character_that_no_tokens_can_write_is_refused_by_name(constraint, field) -> None:
    problem = [field, "has '▁', which no tokens of this model's vocabulary can write"]
    assert check(vocabulary("sentence pieces"), constraint.SerializeToString()) == problem
    assert check(vocabulary("byte fallback"), constraint.SerializeToString()) is None


def test_a_byte_of_a_grammars_own_that_no_token_writes_is_named() -> None:
    tokenizer = Tokenizer(models.Unigram([(EOS, 0.0), *((each, -1.0) for each in 'ab"▁12')], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([EOS])
    over, schema = make_vocabulary(tokenizer), Constraint(json_schema='{"type": "object", "required": ["a"]}')
    problem = check(over, schema.SerializeToString())
    assert problem is not None
    assert problem[1].endswith("only '{' may follow, and no token of the model's vocabulary begins with it")


def test_a_token_that_ends_texts_is_no_part_of_a_text_whatever_its_flag() -> None:
    content = json.loads(byte_level().to_str())
    content["added_tokens"] = [each | {"special": False} for each in content["added_tokens"]]
    over = Vocabulary.of_tokenizer(content, None, [id_of(byte_level(), EOS)])
    for token_ids in walks(Constraint(choice=Choice(texts=["a</s>b", "a</s>c"])), over):
        assert text_of(token_ids, over) in ("a</s>b", "a</s>c")


@pytest.mark.parametrize("decoder", [decoders.Metaspace(), decoders.Sequence([decoders.Metaspace()])])
def test_tokens_of_bytes_have_their_spelling_if_the_decoder_shows_it(decoder) -> None:
    tokenizer = Tokenizer(models.Unigram([("a", 0.0), ("<0x7B>", -1.0), ("▁b", -1.0)], unk_id=0))
    tokenizer.decoder = decoder
    table = TokenTable.of(json.loads(tokenizer.to_str()), {})
    assert b"".join(table.token_bytes).decode() == tokenizer.decode([0, 1, 2]) == "a<0x7B> b"


def test_a_tokenizer_with_another_decoder_is_refused_by_its_name() -> None:
    content = json.loads(byte_level().to_str())
    for decoder, shown in (({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"), (None, "absent")):
        with pytest.raises(ValueError, match=f"^its decoder is {shown}; "):
            TokenTable.of(content | {"decoder": decoder}, {})


def test_tokens_of_the_configuration_keep_the_id_of_their_text_and_new_ones_get_the_next() -> None:
    content, size = json.loads(byte_level().to_str()), byte_level().get_vocab_size()
    decoder = {"5": {"content": "<|new|>", "special": True}, "6": {"content": "the", "special": False}}
    table = TokenTable.of(content, {"added_tokens_decoder": decoder, "added_tokens": {"<old>": size + 9}})
    assert table.special_tokens["<|new|>"] == size
    assert table.text_tokens == {"the": id_of(byte_level(), "the"), "<old>": size + 1}
