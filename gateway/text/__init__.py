"""Text: chat templates, the tokenizer, text from tokens as they come, words and strings that end or are banned."""
