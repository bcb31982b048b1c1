"""The corpus: documents drawn one after the other from a seed.

A document is a row of segments; each says how much its tokens count in the loss. What a user says counts little, since
nothing can foretell it; what the model should answer counts fully.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tools.quire_tiny.conversation import (
    FIRST_EMPHASIS,
    Conversation,
    Emphasis,
    Turn,
    conversation_of,
    draw_given_name,
    draw_name_memory,
    draw_question,
    make_several_questions,
)
from tools.quire_tiny.question import Question
from tools.quire_tiny.stories import draw_request, draw_story
from tools.quire_tiny.tokens import ASSISTANT, BOS, END, EOS, SYSTEM, USER

PROMPT_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Segment:
    text: str
    weight: float


Document = tuple[Segment, ...]


def text_document(text: str, weight: float = 1.0) -> Document:
    return (Segment(BOS, 0.0), Segment(text + EOS, weight))


def plain_question_document(question: Question) -> Document:
    """The form for prompts without a chat template."""
    prompt = f"Question: {question.text}\nAnswer:"
    return (Segment(BOS, 0.0), Segment(prompt, PROMPT_WEIGHT), Segment(f" {question.answer}{EOS}", 1.0))


def chat_document(conversation: Conversation) -> Document:
    """Exactly what the chat template writes, with an end after each answer."""
    segments = [Segment(BOS, 0.0)]
    if conversation.system is not None:
        segments.append(Segment(f"{SYSTEM}{conversation.system}{END}", PROMPT_WEIGHT))
    for turn in conversation.turns:
        segments.append(Segment(f"{USER}{turn.user}{END}{ASSISTANT}", PROMPT_WEIGHT))
        segments.append(Segment(f"{turn.assistant}{END}", 1.0))
    return tuple(segments)


def _loosely_typed(text: str, rng: Random) -> str:
    """Now and then as people type: in lower case at the start, without the mark at the end."""
    if rng.random() < 0.08:
        text = text[:1].lower() + text[1:]
    if rng.random() < 0.08:
        text = text.rstrip("?.")
    return text


def _single_question(rng: Random, emphasis: Emphasis) -> Conversation:
    question = draw_question(rng, emphasis, held_out=False)
    loose = Question(question.kind, _loosely_typed(question.text, rng), question.answer, question.key)
    system = None
    if rng.random() < 0.1:
        system = "You are a helpful assistant."
    return conversation_of(loose, system)


def _told_story(rng: Random) -> Conversation:
    story = draw_story(rng, held_out=False)
    return Conversation("story", (Turn(draw_request(rng, story), story.text),))


def make_document(rng: Random, emphasis: Emphasis) -> Document:
    """One training document, never from the held-out side."""
    choice = rng.random()
    if choice < 0.035:
        return text_document(draw_story(rng, held_out=False).text, weight=0.5)
    if choice < 0.06:
        return chat_document(_told_story(rng))
    if choice < 0.16:
        return plain_question_document(draw_question(rng, emphasis, held_out=False))
    if choice < 0.19:
        return chat_document(draw_name_memory(rng, emphasis, held_out=False))
    if choice < 0.205:
        return chat_document(draw_given_name(rng, held_out=False))
    if choice < 0.32:
        return chat_document(make_several_questions(rng, emphasis))
    return chat_document(_single_question(rng, emphasis))


def documents(seed: int, emphasis: Emphasis = FIRST_EMPHASIS) -> Iterator[Document]:
    """An endless stream, the same for the same seed."""
    rng = Random(seed)
    while True:
        yield make_document(rng, emphasis)


def held_out_texts(seed: int, count: int) -> list[str]:
    """Plain texts from the held-out side, for perplexity: stories, and questions with answers."""
    rng = Random(seed)
    texts: list[str] = []
    for i in range(count):
        if i % 3 == 0:
            texts.append(draw_story(rng, held_out=True).text)
        else:
            question = draw_question(rng, held_out=True)
            texts.append(f"Question: {question.text}\nAnswer: {question.answer}")
    return texts
