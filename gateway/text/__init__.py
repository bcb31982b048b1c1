"""Text: chat templates, the tokenizer, incremental detokenization, stop strings, and formats of answers."""
