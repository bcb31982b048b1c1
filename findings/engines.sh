# Sourced after prelude.sh: installs three engines of constrained generation, and writes engines.py, whose `show`
# prints which of them let a text through that is written byte by byte.
install llguidance==1.9.1 xgrammar==0.2.9 outlines-core==0.2.14 jsonschema==4.26.0 torch==2.13.0 numpy==2.4.6
cat >engines.py <<'PY'
import json
import re

import jsonschema
import llguidance
import xgrammar
from outlines_core import json_schema

_TOKENS = [bytes([byte]) for byte in range(256)] + [b"<end>"]
_END = 256
_COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo(_TOKENS, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[_END])
)


class _Bytes:
    eos_token_id, bos_token_id, tokens, special_token_ids = _END, None, _TOKENS, [_END]

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


_TOKENIZER = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))


def _llguidance(schema, text):
    matcher = llguidance.LLMatcher(_TOKENIZER, llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def _xgrammar(schema, text):
    matcher = xgrammar.GrammarMatcher(_COMPILER.compile_json_schema(json.dumps(schema)))
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(_END)


def _outlines_core(schema, text):
    return re.fullmatch(json_schema.build_regex_from_schema(json.dumps(schema)), text) is not None


def show(schema, text):
    valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
    engines = {"llguidance": _llguidance, "xgrammar": _xgrammar, "outlines-core": _outlines_core}
    admitting = [name for name, admits in engines.items() if admits(schema, text)]
    print(json.dumps(schema))
    print("   ", text, "valid:" if valid else "invalid:", ", ".join(admitting) or "none")
PY
