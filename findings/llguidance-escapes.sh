#!/usr/bin/env bash
# llguidance 1.9.1: characters that JSON writes as escapes are not matched as a schema says.
#
# Expected: what jsonschema 4.26.0 calls invalid is refused.
# Seen: a class that holds all control characters is written as "any escape", so `^[^"]$` admits a quotation mark and
# `^[^\\]{3}$` three backslashes; with two control characters less (`[[^"]--[\x00\x01]]`) it is sound. An additional
# property may spell the name of a property with `\u0061`, and then has another schema. `json_allowed_escapes` without
# `u` closes that, and drops a control character from a constant: it admits another text, and only that.
. "$(dirname "$0")/prelude.sh"
install llguidance==1.9.1 jsonschema==4.26.0
cat >case.py <<'PY'
import json
import textwrap

import jsonschema
import llguidance

TOKENS = [bytes([byte]) for byte in range(256)] + [b"<end>"]


class Bytes:
    eos_token_id, bos_token_id, tokens, special_token_ids = 256, None, TOKENS, [256]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def show(schema, text):
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    admitted = matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()
    plain = {name: value for name, value in schema.items() if name != "x-guidance"}
    valid = jsonschema.Draft202012Validator(plain).is_valid(json.loads(text))
    print("\n".join(textwrap.wrap(json.dumps(schema), 110)))
    print("   ", text, "valid," if valid else "invalid,", "admitted" if admitted else "refused")


show({"type": "string", "pattern": '^[^"]$'}, json.dumps('"'))
show({"type": "string", "pattern": r"^[^\\]{3}$"}, json.dumps("\\\\\\"))
show({"type": "string", "pattern": r'^[[^"]--[\x00\x01]]$'}, r'"\""')
names = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
show(names, '{"a": "x"}')
show(names, r'{"\u0061": "x"}')
show(names | {"x-guidance": {"json_allowed_escapes": 'nrbtf\\"'}}, r'{"\u0061": "x"}')
show({"const": "a\x1bb", "x-guidance": {"json_allowed_escapes": 'nrbtf\\"'}}, '"ab"')
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
{"type": "string", "pattern": "^[^\"]$"}
    "\"" invalid, admitted
{"type": "string", "pattern": "^[^\\\\]{3}$"}
    "\\\\\\" invalid, admitted
{"type": "string", "pattern": "^[[^\"]--[\\x00\\x01]]$"}
    "\"" invalid, refused
{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    {"a": "x"} invalid, refused
{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    {"\u0061": "x"} invalid, admitted
{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"},
"x-guidance": {"json_allowed_escapes": "nrbtf\\\""}}
    {"\u0061": "x"} invalid, refused
{"const": "a\u001bb", "x-guidance": {"json_allowed_escapes": "nrbtf\\\""}}
    "ab" invalid, admitted
TEXT
