"""What a request may ask for, here and now."""

from dataclasses import dataclass

SUPPORTED_N = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """The configured limits, narrowed by what the schedulers offer.

    Attributes:
        vocab_size: Width of the logits; token ids are below it.
        max_model_len: The most tokens of prompt and output together.
        max_prompt_tokens: Always below max_model_len, so that at least one token can be generated.
    """

    vocab_size: int
    max_model_len: int
    max_prompt_tokens: int
    max_message_bytes: int
    max_logprobs: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_token_ids: int
    max_chat_messages: int
