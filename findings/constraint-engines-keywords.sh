#!/usr/bin/env bash
# Pairs of keywords of JSON schema where an engine enforces one and drops the other.
#
# llguidance 1.9.1, xgrammar 0.2.9, outlines-core 0.2.14; each row: a schema, a text, whether it is valid by
# jsonschema 4.26.0, and who lets it through.
# Seen: next to a pattern xgrammar drops minLength, with a warning on stderr. $ref hides its neighbours, and enum
# hides type, in xgrammar and outlines-core. A name in `required` that `properties` lacks is neither required nor
# possible in both: the only valid object cannot be written, an invalid one can. Nothing warns of these. llguidance is
# right in all rows.
. "$(dirname "$0")/prelude.sh"
. "$here/engines.sh"
cat >case.py <<'PY'
from engines import show

show({"type": "string", "pattern": "^a*$", "minLength": 1}, '""')
show({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer"}}}, "1")
show({"type": "integer", "enum": ["a", 1]}, '"a"')
both = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]}
show(both, '{"a": 1}')
show(both, '{"a": 1, "b": 2}')
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
{"type": "string", "pattern": "^a*$", "minLength": 1}
    "" invalid: xgrammar
{"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer"}}}
    1 invalid: xgrammar, outlines-core
{"type": "integer", "enum": ["a", 1]}
    "a" invalid: xgrammar, outlines-core
{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]}
    {"a": 1} invalid: xgrammar, outlines-core
{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]}
    {"a": 1, "b": 2} valid: llguidance
TEXT
