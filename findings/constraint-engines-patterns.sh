#!/usr/bin/env bash
# JSON schema's `pattern` matches anywhere in a string. Of three engines of constrained generation one agrees.
#
# llguidance 1.9.1, xgrammar 0.2.9, outlines-core 0.2.14; each row: the pattern, a valid text, who lets it through.
# Seen: xgrammar and outlines-core take a pattern for one of the whole string, also where it begins with ^, and an
# alternation `^a|b$` for `^(a|b)$`. llguidance admits what jsonschema admits. A schema moved from one server to
# another thus forbids answers that it allowed, or allows other ones.
. "$(dirname "$0")/prelude.sh"
. "$here/engines.sh"
cat >case.py <<'PY'
from engines import show

for pattern, text in (("b", "abc"), ("^b", "bcd"), ("c$", "abc"), ("a|b", "xxb"), ("^a|b$", "axx"), ("^(a|b$)", "axx")):
    show({"type": "string", "pattern": pattern}, f'"{text}"')
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
{"type": "string", "pattern": "b"}
    "abc" valid: llguidance
{"type": "string", "pattern": "^b"}
    "bcd" valid: llguidance
{"type": "string", "pattern": "c$"}
    "abc" valid: llguidance
{"type": "string", "pattern": "a|b"}
    "xxb" valid: llguidance
{"type": "string", "pattern": "^a|b$"}
    "axx" valid: llguidance
{"type": "string", "pattern": "^(a|b$)"}
    "axx" valid: llguidance
TEXT
