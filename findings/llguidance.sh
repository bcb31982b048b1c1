# Sourced after prelude.sh: installs llguidance, and writes engine.py, whose `show` prints whether a text is valid by
# jsonschema, and whether llguidance admits it, written byte by byte.
install llguidance==1.9.1 jsonschema==4.26.0
cat >engine.py <<'PY'
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
PY
