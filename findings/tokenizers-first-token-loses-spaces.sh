#!/usr/bin/env bash
# tokenizers 0.23.3 with a vocabulary whose tokens hold several words (AI21's J2, by SentencePiece): the decoder
# Metaspace takes every space of the first token.
#
# Expected: at most the space at the beginning of a text is dropped; sentencepiece 0.2.3 keeps that one, too.
# Seen: "▁one▁day" at the beginning is "oneday", and anywhere else " one day".
. "$(dirname "$0")/prelude.sh"
install tokenizers==0.23.3 sentencepiece==0.2.3 ai21-tokenizer==1.1.0
cat >case.py <<'PY'
from importlib.resources import files

from sentencepiece import SentencePieceProcessor
from tokenizers import decoders

model = files("ai21_tokenizer") / "resources" / "j2-tokenizer" / "j2-tokenizer.model"
pieces = SentencePieceProcessor(model_file=str(model))
metaspace = decoders.Metaspace()
for text in (" one day they", "they had one day"):
    ids = pieces.encode(text)
    spelled = [pieces.id_to_piece(each) for each in ids]
    print(ascii(spelled), repr(pieces.decode(ids)), repr(metaspace.decode(spelled)))
PY
run env/bin/python case.py
expect <<'TEXT'
['\u2581one\u2581day', '\u2581they'] ' one day they' 'oneday they'
['they', '\u2581had', '\u2581one\u2581day'] 'they had one day' 'they had one day'
TEXT
