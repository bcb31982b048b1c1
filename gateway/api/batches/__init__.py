"""OpenAI's files and batches: the requests in a file run with low priority, and their answers are written to a file."""
