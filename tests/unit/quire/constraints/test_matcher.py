"""Which tokens may follow, over vocabularies of every kind."""

import json

import numpy as np
import pytest

from quire.common.v1.common_pb2 import Choice, Constraint, StructuralTag, StructuralTags
from quire.constraints.json_schema import ConstraintError
from quire.constraints.matcher import MaskMaker, Template, Vocabulary
from quire.model_files.model_directory import ModelDirectory
from quire.model_files.model_source import resolve_model
from tests.support.constraints import (
    TOKENIZERS,
    accepts,
    allowed_texts,
    make_matcher,
    make_template,
    make_vocabulary,
    mask_of,
    spelled,
    vocabulary,
    write,
)
from tests.support.tokenizers import BOS, EOS, byte_level, id_of, write_model_directory

CAT = json.dumps({"type": "object", "properties": {"cat": {"enum": ["the", "a"]}}, "required": ["cat"]})


def tag(begin: str, regex: str, end: str) -> StructuralTag:
    return StructuralTag(begin=begin, regex=regex, end=end)


def tags(*entries: StructuralTag, no_white_space: bool = False, **options: bool) -> Constraint:
    return Constraint(structural_tags=StructuralTags(tags=entries, **options), no_white_space=no_white_space)


@pytest.mark.parametrize(
    ("constraint", "accepted", "refused"),
    [
        (Constraint(regex="[ab]{2}c?"), ["ab", "bac"], ["a", "abcc", "abd"]),
        (Constraint(choice=Choice(texts=["yes", "no", "naïve"])), ["yes", "naïve"], ["y", "yesno", "nai"]),
        (Constraint(lark='start: "a" rest\nrest: "b" | "c" rest'), ["ab", "accb"], ["a", "ac"]),
        (Constraint(lark='root ::= "a" root | "b"'), ["b", "aab"], ["a", "ba"]),
        (Constraint(json_schema='{"type": "integer", "minimum": 3, "maximum": 17}'), ["3", "17"], ["2", "18", "3.5"]),
        (Constraint(json_schema="true"), ["1", '{"a": [null]}'], ["{", "x"]),
        (Constraint(json_object={}), ["{}", '{"a": {"b": 1}}'], ["[]", "1"]),
        (Constraint(json_schema=CAT), ['{"cat": "the"}', '{ "cat" : "a" }'], ['{"cat": "dog"}', "{}", ' {"cat": "a"}']),
    ],
    ids=lambda value: value.WhichOneof("kind") if isinstance(value, Constraint) else None,
)
def test_complete_texts_are_those_of_the_constraint(constraint, accepted, refused) -> None:
    assert [accepts(constraint, text) for text in accepted] == [True] * len(accepted)
    assert [accepts(constraint, text) for text in refused] == [False] * len(refused)


def test_white_space_of_json_is_bounded_and_styles_of_indentation_are_possible() -> None:
    value = {"a": [1, {"b": {"a": []}}], "b": {}}
    constraint = Constraint(json_schema='{"type": "object"}')
    assert accepts(constraint, json.dumps(value))
    assert accepts(constraint, json.dumps(value, separators=(",", ":")))
    for indent in (0, 2, 4, "\t"):
        assert accepts(constraint, json.dumps(value, indent=indent))
    for text in ("{\n\n}", "{  }", "{\t}", "{ \n}", "{\n" + " " * 33 + "}", "{\n \t}", "{\r\n}"):
        assert not accepts(constraint, text)


@pytest.mark.parametrize(
    ("constraint", "before", "after"),
    [
        (Constraint(json_schema='{"type": "object"}', no_white_space=True, begins_after=">"), ">", ""),
        (tags(StructuralTag(begin=">", json_schema="{}", end="<"), no_white_space=True), ">", "<"),
    ],
    ids=["schema", "tag"],
)
def test_json_without_white_space_has_none_but_in_its_strings(constraint, before, after) -> None:
    value = {"a": [1, {"b": " "}], "c d": {}}
    assert accepts(constraint, before + json.dumps(value, separators=(",", ":")) + after)
    for text in (json.dumps(value), json.dumps(value, indent=1), '{ "a":1}', '{"a":1\n}', "{ }", '{"a": 1}'):
        assert not accepts(constraint, before + text + after), text


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_eos_may_follow_only_where_the_text_is_complete(kind) -> None:
    matcher = make_matcher(Constraint(regex="a(bc)?"), kind)
    eos = EOS.encode()
    seen = []
    for token_id in spelled("abc", vocabulary(kind))[-3:]:
        seen.append(eos in allowed_texts(matcher, kind))
        matcher.consume(token_id)
    assert seen == [False, True, False]
    assert allowed_texts(matcher, kind) == {eos}
    # After the end nothing but the end may follow.
    for token_id in vocabulary(kind).eos:
        matcher.consume(token_id)
    assert allowed_texts(matcher, kind) == {eos}


def test_a_text_ends_with_any_of_its_ending_tokens_and_these_are_no_text_before() -> None:
    held = vocabulary("byte level")
    (b,) = spelled("b")
    matcher = make_template(Constraint(regex="ab?c")).matcher((b,))
    matcher.consume(*spelled("a"))
    assert allowed_texts(matcher) == {b"c"}
    matcher.consume(*spelled("c"))
    assert allowed_texts(matcher) == {b"b"}
    assert not held.eos & set(np.flatnonzero(mask_of(matcher, held)).tolist())


def test_the_end_is_delayed_as_long_as_something_else_may_follow() -> None:
    held, matcher = vocabulary("byte level"), make_matcher(Constraint(regex="aa?"))
    eos = next(iter(held.eos))
    matcher.consume(*spelled("a"))
    assert [bool(mask_of(matcher, held, delays_end=delays)[eos]) for delays in (False, True)] == [True, False]
    matcher.consume(*spelled("a"))
    assert mask_of(matcher, held, delays_end=True)[eos]
    matcher.consume(*spelled("b"))
    assert not mask_of(matcher, held).any()
    assert "cannot follow" in (matcher.error or "")


def test_a_text_of_very_many_readings_ends_before_its_masks_take_long() -> None:
    held = Vocabulary.of_model(ModelDirectory.open(resolve_model(None)), None)
    constraint = Constraint(lark='start: s "zz"\ns: s s | "a" | "b" | " "')
    matcher = Template.of(constraint, held).matcher(tuple(held.eos))
    allowed = np.flatnonzero(mask_of(matcher, held)).tolist()
    longest = max(allowed, key=lambda token_id: len(held.token_bytes[token_id]))
    for _ in range(60):
        mask_of(matcher, held)
        matcher.consume(longest)
    assert "items" in (matcher.error or "")


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(json_schema=CAT),
        Constraint(regex="(the cat|hello) [0-9]{1,3}"),
        Constraint(json_object={}, begins_after="the"),
        tags(tag("<", "[0-9]{2}", ">"), tag("(c", "[xy]+", ""), required=True),
        tags(tag("<a>", "[0-9]{1,2}", "</a>"), no_free_text=True),
    ],
    ids=["schema", "regex", "after", "tags", "tags alone"],
)
def test_a_matcher_is_a_function_of_its_tokens(kind, constraint) -> None:
    template, rng = make_template(constraint, kind), np.random.default_rng(1)
    held = template.vocabulary
    copies = []

    def compare(written, mask) -> None:
        again = template.matcher(tuple(held.eos))
        for token_id in written:
            again.consume(token_id)
        copies.append(again.copy())
        (replayed,) = MaskMaker(held, 1).make([again], [False])
        assert np.array_equal(replayed, mask)
        # A copy goes its own way: the one of the step before has not moved.
        if len(copies) > 1:
            copies[-2].consume(written[-1])
            (copied,) = MaskMaker(held, 1).make([copies[-2]], [False])
            assert np.array_equal(copied, mask)

    for _ in range(3):
        copies.clear()
        write(template, lambda ids: int(rng.choice(ids)), max_tokens=40, on_step=compare)


def test_free_text_before_the_beginning_may_be_anything_but_the_end() -> None:
    held = vocabulary("byte level")
    matcher = make_matcher(Constraint(regex="[0-9]+", begins_after="</think>"))
    for token_id in spelled("hello 😀 </thin"):
        matcher.consume(token_id)
    mask = mask_of(matcher, held)
    (eos,) = held.eos
    assert not mask[eos]
    assert np.delete(mask, eos).all()
    for token_id in spelled("k>"):
        matcher.consume(token_id)
    assert allowed_texts(matcher) <= {bytes([digit]) for digit in b"0123456789"}


def test_no_token_goes_beyond_a_beginning() -> None:
    held = vocabulary("byte level")
    # "the", " cat" and " the" are tokens of this vocabulary.
    matcher = make_matcher(Constraint(regex="[0-9]+", begins_after="t"))
    texts = allowed_texts(matcher)
    assert b"t" in texts
    assert not any(b"t" in text[:-1] for text in texts)
    halfway = make_matcher(Constraint(regex="[0-9]+", begins_after="xth"))
    for token_id in spelled("x"):
        halfway.consume(token_id)
    assert not any(text.startswith(b"th") and text != b"th" for text in allowed_texts(halfway))
    assert any(text.startswith(b"th") and text != b"th" for text in held.token_bytes)
    # JSON may begin with white space there.
    json_after = make_matcher(Constraint(json_object={}, begins_after=">"))
    for token_id in spelled("x>\n\n{}"):
        json_after.consume(token_id)
    assert json_after.error is None
    assert json_after.may_end


def test_a_token_goes_beyond_a_beginning_where_the_part_after_it_takes_the_rest() -> None:
    for rest, others in (("he[0-9]", ()), ("h[0-9]", (b"the", b" the"))):
        matcher = make_matcher(tags(tag("t", rest, ".")))
        texts = allowed_texts(matcher)
        assert {b"the", b" the"} - set(others) <= texts
        assert not texts & set(others)
    for spelling in (["the"], ["t", "he"], [" the"]):
        matcher = make_matcher(tags(tag("t", "he[0-9]", "."), tag("<b>", "x", "")))
        for text in (*spelling, "1", ".", "<", "b", ">"):
            (token_id,) = spelled(text)
            matcher.consume(token_id)
        assert matcher.error is None
        assert allowed_texts(matcher) == {b"x"}


def test_a_beginning_that_is_a_special_token_is_that_token() -> None:
    alone = make_matcher(tags(tag(BOS, "[0-9]", ""), no_free_text=True, required=True))
    assert allowed_texts(alone) == {BOS.encode()}
    alone.consume(id_of(byte_level(), BOS))
    assert allowed_texts(alone) <= {bytes([digit]) for digit in b"0123456789"}
    free = make_matcher(tags(tag(BOS, "[0-9]", "")))
    free.consume(id_of(byte_level(), BOS))
    assert allowed_texts(free) <= {bytes([digit]) for digit in b"0123456789"}


def test_tags_open_constrained_parts_of_free_text() -> None:
    constraint = tags(tag("<a>", "[0-9]{2}", "</a>"), tag("<b>", "x", ";"))
    for text in ("", "hello", "hello <a>12</a> there <b>x;<a>34</a>", "<a", "a<a>12</a>"):
        assert accepts(constraint, text), text
    for text in ("<a>1</a>", "<a>12", "<b>12</a>", "hello <b>x"):
        assert not accepts(constraint, text), text


def test_a_tag_may_be_required_single_and_alone() -> None:
    part = tag("<", "[0-9]", ">")
    assert [accepts(tags(part, required=True), text) for text in ("", "x", "x<1>", "x<1>y<2>")] == [0, 0, 1, 1]
    assert [accepts(tags(part, single=True), text) for text in ("", "x<1>", "x<1>y")] == [1, 1, 0]
    assert [accepts(tags(part, no_free_text=True), text) for text in ("", "<1><2>", "x<1>", "<1>y")] == [1, 1, 0, 0]
    alone = tags(part, no_free_text=True, required=True, single=True)
    assert [accepts(alone, text) for text in ("", "<1>", "<1><2>")] == [0, 1, 0]


def test_tags_that_begin_alike_are_alternatives_and_a_part_without_an_end_goes_on_where_it_may_end() -> None:
    constraint = tags(tag("<", "a+", ">"), tag("<", "b", ";"))
    assert [accepts(constraint, text) for text in ("<aa>", "<b;", "<b>", "<a;")] == [True, True, False, False]
    constraint = tags(tag("#", "[0-9]+", ""))
    assert [accepts(constraint, text) for text in ("a #12", "a #12 b #3", "a #", "a #b")] == [True, True, False, False]


def test_logits_may_be_wider_or_narrower_than_the_vocabulary() -> None:
    wider = make_vocabulary(byte_level(), byte_level().get_vocab_size() + 100)
    assert wider.num_words * 32 >= byte_level().get_vocab_size() + 100
    assert make_vocabulary(byte_level(), 300).tokenizer.vocab_size == byte_level().get_vocab_size()


def test_special_tokens_are_those_of_both_files_of_the_tokenizer(tmp_path) -> None:
    size = byte_level().get_vocab_size()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    decoder = {str(size): {"content": "<|call|>", "special": True, **flags}}
    decoder[str(size + 1)] = {"content": "<think>", "special": False, **flags}
    config = {"added_tokens_decoder": decoder, "additional_special_tokens": ["<think>"], "pad_token": "<pad>"}
    directory = write_model_directory(tmp_path / "m", byte_level(), tokenizer_config__json=json.dumps(config))
    held = Vocabulary.of_model(ModelDirectory.open(directory), size + 3)
    assert held.special_tokens == {BOS: 0, EOS: 1, "<|call|>": size, "<pad>": size + 2}
    # An answer shows it, as in transformers.
    assert held.text_tokens == {"<think>": size + 1}
    assert held.token_bytes[size : size + 3] == [b"<|call|>", b"<think>", b"<pad>"]


@pytest.mark.parametrize(
    ("constraint", "field", "problem"),
    [
        (Constraint(regex="(a"), "regex", "unclosed group"),
        (Constraint(regex="(?=a)b"), "regex", "look-around"),
        (Constraint(lark="start: missing"), "lark", "missing"),
        (Constraint(lark='begin: "a"'), "lark", "start"),
        (Constraint(lark="root ::= ("), "lark", "GBNF"),
        (Constraint(json_schema='{"$ref": "#/$defs/missing"}'), "json_schema", "missing"),
        (Constraint(json_schema='{"type": "string", "pattern": "(a"}'), "json_schema", "unclosed group"),
        (Constraint(json_schema='{"type": "integer", "minimum": 5, "maximum": 2}'), "json_schema", "minimum"),
        (tags(tag("<", "(", ">")), "structural_tags.tags[0]", "unclosed group"),
        (Constraint(regex="a" * 8193), "regex", "^regex has 8,193 characters; a regular expression has at most 8,192"),
        (Constraint(lark=f"start: /{'a' * 8193}/"), "lark", "8,193 characters in the terminal /aaaaaa"),
        (tags(tag("<", "a" * 8193, ">")), "structural_tags.tags[0].regex", "8,193 characters"),
        (
            Constraint(json_schema=json.dumps({"items": {"type": "string", "pattern": "a" * 8193}})),
            "json_schema",
            "8,193 characters in the pattern at ",
        ),
        (Constraint(regex="a" * 8000 + "(b"), "regex", r'expression: unclosed group at "\(b"$'),
        (Constraint(regex="a", no_white_space=True), "no_white_space", "regex is not about JSON; leave it out"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused_by_field(constraint, field, problem) -> None:
    with pytest.raises(ConstraintError, match=problem) as refused:
        make_template(constraint)
    assert refused.value.field == field
