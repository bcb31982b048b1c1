"""A model directory that answers: greedily, many prompts at once."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from tools.quire_tiny.conversation import Conversation
from tools.quire_tiny.tokens import END_ID, EOS, EOS_ID, PAD_ID


@dataclass(frozen=True, slots=True)
class Answer:
    """`ended` is false where the model ran into the limit of tokens."""

    text: str
    ended: bool


@dataclass(frozen=True, slots=True)
class Perplexity:
    documents: int
    tokens: int
    value: float


class Answerer:
    def __init__(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
        self.tokenizer.padding_side = "left"
        self.model = LlamaForCausalLM.from_pretrained(directory, dtype=dtype).eval()

    def chat_prompt(self, conversation: Conversation) -> str:
        """Everything before the last answer, through the chat template."""
        messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn.user})
            messages.append({"role": "assistant", "content": turn.assistant})
        return str(self.tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True))

    @torch.inference_mode()
    def answer(self, prompts: list[str], max_tokens: int) -> list[Answer]:
        """Prompts must hold their special tokens already."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        # transformers types generate() against a protocol that its own models do not meet.
        output = self.model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=[EOS_ID, END_ID],
            pad_token_id=PAD_ID,
        )
        return [self._answer_of(ids) for ids in output[:, inputs["input_ids"].shape[1] :].tolist()]

    def _answer_of(self, ids: list[int]) -> Answer:
        ended = EOS_ID in ids or END_ID in ids
        return Answer(str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip(), ended)

    @torch.inference_mode()
    def perplexity(self, texts: list[str]) -> Perplexity:
        """Over every token after the first, the end of each text included."""
        total, count = 0.0, 0
        for text in texts:
            ids = torch.tensor([self.tokenizer(text + EOS)["input_ids"]])
            logits = self.model(input_ids=ids).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += ids.shape[1] - 1
        return Perplexity(len(texts), count, math.exp(total / count))
