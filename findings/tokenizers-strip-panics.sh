#!/usr/bin/env bash
# tokenizers 0.23.3: the decoder Strip, with characters to strip at the end, panics on an empty token.
#
# Expected: a token with fewer characters than it may strip becomes empty.
# Seen: an empty token, and one whose only character could go from either end, raise PanicException. That is no
# `Exception`, so a server's handlers of errors do not catch it. A space as the last token of a text is such a token.
. "$(dirname "$0")/prelude.sh"
install tokenizers==0.23.3
cat >case.py <<'PY'
from tokenizers.decoders import Strip

for left, right, tokens in ((0, 1, ["a ", " "]), (0, 1, ["a", ""]), (1, 1, ["a", " "]), (1, 0, ["", " "])):
    try:
        seen = repr(Strip(" ", left, right).decode(tokens))
    except BaseException as error:
        seen = f"{type(error).__name__}, an Exception: {isinstance(error, Exception)}"
    print(left, right, tokens, seen)
PY
run env/bin/python case.py
expect <<'TEXT'
0 1 ['a ', ' '] 'a'
0 1 ['a', ''] PanicException, an Exception: False
1 1 ['a', ' '] PanicException, an Exception: False
1 0 ['', ' '] ''
TEXT
