"""The corpus: documents drawn one after the other from a seed.

A document is a row of segments; each says how much its tokens count in the loss. What a user says counts little, since
nothing can foretell it; what the model should answer counts fully.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from assets.training.instruction_questions import INSTRUCTION_KINDS
from assets.training.number_questions import NUMBER_KINDS
from assets.training.questions import FACT_KINDS, MakeQuestion, Question, draw, draw_name, is_held_out
from assets.training.small_talk import SMALL_TALK_KINDS
from assets.training.stories import draw_request, draw_story

PAD = "<pad>"
BOS = "<s>"
EOS = "</s>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"

SPECIAL_TOKENS = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END)
PAD_ID, BOS_ID, EOS_ID, END_ID = 0, 1, 2, 6

# Functions are shown by their signatures, since a whole schema takes more of the context than a conversation does.
CHAT_TEMPLATE = (
    "{% macro kind(schema) %}"
    "{% if schema.enum is defined %}{{ schema.enum | tojson }}"
    "{% elif schema.type is string %}{{ schema.type | tojson }}"
    "{% elif schema.type is defined %}{{ schema.type | first | tojson }}"
    "{% elif schema.anyOf is defined %}{{ kind(schema.anyOf | first) }}"
    "{% else %}{{ 'any' | tojson }}{% endif %}"
    "{% endmacro %}"
    "{% macro signature(function) %}"
    "{{ '{\"name\": ' + (function.name | tojson) }}"
    "{% if function.description %}{{ ', \"description\": ' + (function.description | trim | tojson) }}{% endif %}"
    "{{ ', \"parameters\": {' }}"
    "{% for name, schema in ((function.parameters or {}).properties or {}).items() %}"
    "{% set shown = kind(schema) %}"
    "{% if shown[0] == '\"' and schema.description is string and schema.description | trim %}"
    "{% set shown = shown[:-1] + ': ' + ((schema.description | trim).split('\n') | first | tojson)[1:] %}"
    "{% endif %}"
    "{{ name | tojson }}: {{ shown }}{{ '' if loop.last else ', ' }}"
    "{% endfor %}"
    "{{ '}' }}"
    "{% set required = (function.parameters or {}).required or [] %}"
    "{% if required and required | length < (function.parameters or {}).properties | length %}"
    "{{ ', \"required\": ' + (required | tojson) }}"
    "{% endif %}"
    "{{ '}\n' }}"
    "{% endmacro %}"
    "{{ bos_token }}"
    "{% set ns = namespace(rest=messages) %}"
    "{% if tools %}"
    "{{ '<|system|>' }}"
    "{% if messages and messages[0]['role'] in ('system', 'developer') %}"
    "{{ messages[0]['content'] | trim + '\n' }}{% set ns.rest = messages[1:] %}"
    "{% endif %}"
    "{{ '<tools>\n' }}"
    "{% for tool in tools %}{{ signature(tool.function or tool) }}{% endfor %}"
    "{{ '</tools><|end|>' }}"
    "{% endif %}"
    "{% for message in ns.rest %}"
    "{% set content = (message['content'] or '') | trim %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '\n' if not loop.first and loop.previtem['role'] == 'tool' else '<|user|>' }}"
    "{{ '<tool_response>\n' + content + '\n</tool_response>' }}"
    "{{ '' if not loop.last and loop.nextitem['role'] == 'tool' else '<|end|>' }}"
    "{% else %}"
    "{{ '<|' + ('system' if message['role'] == 'developer' else message['role']) + '|>' + content }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% set function = call.function or call %}"
    "{{ '\n' if content or not loop.first else '' }}"
    "{{ '<tool_call>\n{\"name\": ' + (function.name | tojson) + ', \"arguments\": ' }}"
    "{{ function.arguments if function.arguments is string else function.arguments | tojson }}"
    "{{ '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


QUESTION_KINDS: dict[str, MakeQuestion] = {**FACT_KINDS, **NUMBER_KINDS, **INSTRUCTION_KINDS, **SMALL_TALK_KINDS}

# How often a kind is asked, where 1.0 does not suit it. Sums need the most practice, so they come first; each later
# emphasis goes to what is then still weak.
Emphasis = Mapping[str, float]
FIRST_EMPHASIS: Emphasis = {
    "addition": 12.0, "subtraction": 13.0, "multiplication": 1.5, "word_problem": 3.0, "comparison": 2.5,
    "reverse_order": 1.5, "count": 1.5, "last_of": 1.5, "length": 1.5, "spell": 1.5, "last_letter": 1.5,
    "about_itself": 0.0, "who_it_is": 0.0,
}  # fmt: skip
SECOND_EMPHASIS: Emphasis = {
    "addition": 9.0, "subtraction": 11.0, "multiplication": 5.0, "word_problem": 4.0, "comparison": 3.0,
    "reverse_order": 2.0, "count": 5.0, "last_of": 1.5, "length": 1.5, "spell": 4.0, "last_letter": 2.0,
    "uppercase": 4.0, "repeat": 4.0, "say_times": 4.0, "opposite": 2.0, "country": 2.0, "capital": 1.5,
    "next_number": 1.5, "parity": 1.5, "about_itself": 2.0, "who_it_is": 0.0,
}  # fmt: skip
THIRD_EMPHASIS: Emphasis = {
    "addition": 10.0, "subtraction": 11.0, "multiplication": 4.0, "word_problem": 4.0, "comparison": 6.0,
    "reverse_order": 1.5, "count": 4.0, "spell": 2.0, "uppercase": 3.0, "repeat": 10.0, "say_times": 8.0,
    "opposite": 2.0, "capital": 1.5, "category": 1.5, "identity": 2.0, "about_itself": 3.0, "who_it_is": 0.0,
}  # fmt: skip
# For the second course, which must not wear off what the first one taught.
FOURTH_EMPHASIS: Emphasis = {
    "addition": 9.0, "subtraction": 10.0, "multiplication": 4.0, "word_problem": 4.0, "comparison": 9.0,
    "reverse_order": 1.5, "count": 4.0, "spell": 2.0, "uppercase": 3.0, "repeat": 14.0, "say_times": 9.0,
    "opposite": 2.0, "capital": 2.0, "category": 1.5, "identity": 2.0, "about_itself": 3.0, "past": 2.5,
    "who_it_is": 0.0, "colour": 2.5, "country": 2.5, "next_number": 2.0, "plural": 1.5,
}  # fmt: skip

# For the third course: tools in other words, beside what the model is asked about itself.
FIFTH_EMPHASIS: Emphasis = {**FOURTH_EMPHASIS, "identity": 6.0, "about_itself": 6.0, "who_it_is": 8.0, "capital": 3.0}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are quire-tiny, a small and friendly model.", "You are a friendly helper.",
    "Answer the questions of the user.", "Be brief and correct.", "You are a helpful assistant. Keep answers short.",
)  # fmt: skip

_TELL_NAME = ("My name is {x}.", "I am {x}.", "Hello, my name is {x}.", "Hi, I am {x}.", "Please call me {x}.")
_ASK_NAME = ("What is my name?", "Who am I?", "Do you know my name?", "Tell me my name.", "What am I called?")
_GIVE_NAME = ("Your name is {x}.", "You are {x}, a helpful assistant.", "You are {x}.", "You are called {x}.")
_ASK_GIVEN_NAME = ("What is your name?", "Who are you?", "Tell me who you are.", "Introduce yourself.")


@dataclass(frozen=True, slots=True)
class Turn:
    user: str
    assistant: str


@dataclass(frozen=True, slots=True)
class Conversation:
    kind: str
    turns: tuple[Turn, ...]
    system: str | None = None


def conversation_of(question: Question, system: str | None = None) -> Conversation:
    return Conversation(question.kind, (Turn(question.text, question.answer),), system)


def draw_question(rng: Random, emphasis: Emphasis = FIRST_EMPHASIS, *, held_out: bool) -> Question:
    """A question of any kind, emphasized kinds more often."""
    kinds = list(QUESTION_KINDS)
    kind = rng.choices(kinds, [emphasis.get(kind, 1.0) for kind in kinds])[0]
    return draw(QUESTION_KINDS[kind], rng, held_out=held_out)


def _turns(rng: Random, emphasis: Emphasis, count: int) -> list[Turn]:
    questions = (draw_question(rng, emphasis, held_out=False) for _ in range(count))
    return [Turn(question.text, question.answer) for question in questions]


def make_several_questions(rng: Random, emphasis: Emphasis) -> Conversation:
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.4 else None
    return Conversation("several", tuple(_turns(rng, emphasis, rng.randint(2, 5))), system)


def draw_name_memory(rng: Random, emphasis: Emphasis = FIRST_EMPHASIS, *, held_out: bool) -> Conversation:
    """The user tells a name, asks up to two other things, then asks for the name."""
    while True:
        name, tell, ask = draw_name(rng), rng.choice(_TELL_NAME), rng.choice(_ASK_NAME)
        if is_held_out(f"{name} {tell} {ask}") is held_out:
            break
    told = Turn(tell.format(x=name), f"Nice to meet you, {name}!")
    asked = Turn(ask, f"Your name is {name}.")
    return Conversation("name_memory", (told, *_turns(rng, emphasis, rng.randint(0, 2)), asked))


def draw_given_name(rng: Random, *, held_out: bool) -> Conversation:
    """The system prompt gives the model another name."""
    while True:
        name, give, ask = draw_name(rng), rng.choice(_GIVE_NAME), rng.choice(_ASK_GIVEN_NAME)
        if is_held_out(f"{name} {give} {ask}") is held_out:
            return Conversation("given_name", (Turn(ask, f"I am {name}."),), give.format(x=name))


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
