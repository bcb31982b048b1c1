"""How the embedded model of `assets/quire-tiny` is made: corpus, tokenizer, training, evaluation."""
