"""OpenAI's files and batches: requests in a file, run when there is room, with their answers in a file."""
