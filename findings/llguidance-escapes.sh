#!/usr/bin/env bash
# llguidance 1.9.1: characters that JSON writes as escapes are not matched as a schema says.
#
# Expected: what jsonschema 4.26.0 calls invalid is refused.
# Seen: a class that holds all control characters is written as "any escape", so `^[^"]$` admits a quotation mark and
# `^[^\\]{3}$` three backslashes; with two control characters less (`[[^"]--[\x00\x01]]`) it is sound. An additional
# property may spell the name of a property with `\u0061`, and then has another schema. `json_allowed_escapes` without
# `u` closes that, and drops a control character from a constant: it admits another text, and only that.
. "$(dirname "$0")/prelude.sh"
. "$here/llguidance.sh"
cat >case.py <<'PY'
import json

from engine import show

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
