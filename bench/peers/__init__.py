"""Programs that run other engines, each by an interpreter of its own in which that engine is installed.

They import nothing of Quire. Each reads one JSON line, {"model", "rounds": [[[token ids, output tokens], ...], ...]},
and answers each round by one, {"seconds", "num_tokens", "first_token_s"}: the time for all requests at once, the tokens
that came, and the median time to a request's first token.
"""
