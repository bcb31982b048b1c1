#!/usr/bin/env bash
# llguidance 1.9.1: numbers of a schema that come out as others.
#
# Expected: what jsonschema 4.26.0 calls valid is admitted, what it calls invalid is refused.
# Seen: integers go through a double, so a constant beyond 2^53 admits its neighbour and not itself, and a bound there
# is off by one. An `enum` of 1e20 for an integer becomes the largest 64-bit integer. An exclusive lower bound is
# included if an upper bound stands within the next integer. Below a maximum of two digits a number of one digit is
# refused, and admitted with a zero behind it. Common multiples in `allOf` wrap at 32 bits.
. "$(dirname "$0")/prelude.sh"
. "$here/llguidance.sh"
cat >case.py <<'PY'
from engine import show

large = 1234567890123456789
show({"enum": [large]}, str(large))
show({"enum": [large]}, str(large - 21))
show({"type": "integer", "exclusiveMinimum": 2**53}, str(2**53))
show({"type": "integer", "enum": [1e20]}, str(2**63 - 1))
show({"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}, "3")
show({"type": "number", "maximum": 0.84, "minimum": 0}, "0.8")
show({"type": "number", "maximum": 0.84, "minimum": 0}, "0.80")
show({"type": "integer", "allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, str(65537 * 65539))
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
{"enum": [1234567890123456789]}
    1234567890123456789 valid, refused
{"enum": [1234567890123456789]}
    1234567890123456768 invalid, admitted
{"type": "integer", "exclusiveMinimum": 9007199254740992}
    9007199254740992 invalid, admitted
{"type": "integer", "enum": [1e+20]}
    9223372036854775807 invalid, admitted
{"type": "number", "exclusiveMinimum": 3, "maximum": 3.5}
    3 invalid, admitted
{"type": "number", "maximum": 0.84, "minimum": 0}
    0.8 valid, refused
{"type": "number", "maximum": 0.84, "minimum": 0}
    0.80 valid, admitted
{"type": "integer", "allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}
    4295229443 valid, refused
TEXT
