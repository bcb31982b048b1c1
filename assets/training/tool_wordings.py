"""More words for the same skills: descriptions in every usual style, and more ways to ask.

The split looks at the description and at the wording of the question, so that both can be measured unseen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from assets.training.questions import is_held_out, sentence_case


@dataclass(frozen=True, slots=True)
class Wording:
    """What a skill's tools do: a verb and what it is done to, `|` between what may stand; and ways to ask for it."""

    verbs: str
    things: str
    asks: tuple[str, ...]


_GET = "get|get|fetch|return|look up|find|retrieve|show|give|tell|check|provide"
_CALCULATE = "calculate|compute|return|get|find|give"

WORDINGS: dict[str, Wording] = {
    "weather": Wording(
        _GET,
        "the weather in a city|the current weather in a city|the weather for a city|the weather of a place|"
        "weather information for a location|the current weather for a given location|the temperature in a city|"
        "the weather forecast for a city|current weather data|the weather at a location|today's weather in a town|"
        "the weather|the current temperature of a place|weather conditions in a given city|the weather for a location",
        ("What will the weather be in {place}?", "How's the weather in {place}?", "Will it rain in {place} today?",
         "What is the weather like in {place} now?", "What's the weather like today in {place}?",
         "Can you tell me the weather in {place}?", "Give me the weather in {place}.", "Weather for {place}",
         "Show me the weather for {place}.", "How hot is it in {place}?", "How cold is it in {place} right now?",
         "Could you check the weather in {place}?", "What is the current weather in {place}?", "{place} weather",
         "What's the weather for {place}?", "What is the forecast for {place}?", "Is it sunny in {place}?",
         "Is it warm in {place} today?", "I am going to {place}. What is the weather like there?",
         "What is the temperature in {place}?", "Check the weather in {place}.", "Please get the weather in {place}.",
         "Will I need a coat in {place}?", "Does it snow in {place}?", "How is the weather today in {place}?",
         "What kind of weather is it in {place}?", "I want to know the weather in {place}.")),
    "time": Wording(
        _GET,
        "the time in a city|the current time in a city|the local time of a place|the time at a location|"
        "what time it is in a city|the current time for a given location|the hour in a town|local time in a city",
        ("What's the time in {place}?", "What time is it now in {place}?", "Can you tell me the time in {place}?",
         "What is the local time in {place}?", "Do you know what time it is in {place}?",
         "Give me the time in {place}.",
         "What is the current time in {place}?", "What hour is it in {place}?", "Current time in {place}",
         "Check the time in {place}.", "I want to know the time in {place}.", "Show me the time in {place}.")),
    "now": Wording(
        _GET, "the current time|the current date|the date and the time|the time now|today's date|the time of day",
        ("Can you tell me the time?", "Do you know what time it is?", "What is the current time?", "What day is it?",
         "Which day is today?", "Give me the current time.", "What's today's date?", "Tell me the date.",
         "Current time", "What is the date?")),
    "population": Wording(
        _GET,
        "the population of a city|the number of people in a city|how many people live in a city|"
        "the number of inhabitants of a place|population of a town|the size of a city's population",
        ("How many people are there in {place}?", "What's the population of {place}?", "Population of {place}",
         "How large is the population of {place}?", "Give me the population of {place}.",
         "Can you tell me how many people live in {place}?", "How many residents does {place} have?",
         "How many people live in the city of {place}?", "What number of people lives in {place}?")),
    "add": Wording(
        "add|sum|sum up|add up", "two numbers|a and b|two integers|numbers|two values|two given numbers",
        ("What do you get if you add {a} and {b}?", "Please add {a} and {b}.", "What's the sum of {a} and {b}?",
         "Can you add {a} and {b}?", "Sum {a} and {b}.", "{a} plus {b}", "How much is {a} plus {b}?",
         "Add {a} to {b}.", "Compute {a} + {b}.", "Add the numbers {a} and {b}.", "Give me the sum of {a} and {b}.")),
    "subtract": Wording(
        "subtract", "two numbers|b from a|two integers|one number from another|the second number from the first",
        ("What's {a} - {b}?", "Please subtract {b} from {a}.", "Can you subtract {b} from {a}?", "{a} minus {b}",
         "How much is {a} minus {b}?", "Take {b} away from {a}.", "Compute {a} - {b}.",
         "What is the difference of {a} and {b}?", "What do you get if you take {b} from {a}?")),
    "multiply": Wording(
        "multiply", "two numbers|a and b|two integers|a by b|two values|one number by another|two given numbers",
        ("What's {a} * {b}?", "Please multiply {a} by {b}.", "Can you multiply {a} and {b}?", "{a} times {b}",
         "What is the product of {a} and {b}?", "How much is {a} times {b}?", "What is {a} multiplied by {b}?",
         "Compute {a} * {b}.", "Multiply the numbers {a} and {b}.", "What do you get if you multiply {a} by {b}?")),
    "divide": Wording(
        "divide", "two numbers|a by b|one number by another|two integers|the first number by the second",
        ("What's {a} / {b}?", "Please divide {a} by {b}.", "Can you divide {a} by {b}?", "{a} divided by {b}",
         "How much is {a} divided by {b}?", "Compute {a} / {b}.", "What's {a} divided by {b}?",
         "What do you get if you divide {a} by {b}?")),
    "calculate": Wording(
        "calculate|evaluate|compute|solve|work out",
        "a mathematical expression|an arithmetic expression|an expression|a formula|the value of an expression|a sum",
        ("Can you calculate {expression}?", "What is the value of {expression}?", "Work out {expression}.",
         "Please compute {expression}.", "What's the result of {expression}?", "Please calculate {expression}.",
         "What does {expression} give?", "How much does {expression} make?", "Do the sum {expression}.")),
    "search": Wording(
        "search|look through|query", "the web|the internet|the web for a query|pages about a topic|documents by text|"
        "the documents|Wikipedia|the web for information|articles about a topic|the knowledge base",
        ("Can you search for {query}?", "Please look up {query}.", "Search online for {query}.",
         "Do a search for {query}.", "Search for information about {query}.", "Look for {query} on the web.",
         "Find pages about {query}.", "Find articles about {query}.", "I need information about {query}.",
         "Query the web for {query}.", "What can you find about {query}?", "Web search: {query}")),
    "dice": Wording(
        "roll|throw|toss", "dice|some dice|a number of dice|dice with a number of sides|a die|a dice and give the sum",
        ("Can you roll {count} dice?", "I want to throw {count} dice.", "Roll {count} dice for me.",
         "Toss {count} dice.", "Roll {count} dice that have {sides} sides.", "Please throw {count} dice.",
         "Roll a die that has {sides} sides.", "Let {count} dice roll.", "Throw a die with {sides} sides.")),
    "coin": Wording(
        "flip|toss|throw", "a coin|a coin and return heads or tails|a fair coin|the coin",
        ("Can you flip a coin?", "Flip a coin for me.", "Let us flip a coin.", "Could you toss a coin?",
         "I need heads or tails.", "Toss the coin.", "Flip the coin, please.", "Throw a coin.", "Coin flip")),
    "random": Wording(
        "get|draw|pick|generate|return|choose",
        "a random number|a random integer|a random number between two limits|a number in a range|a random value",
        ("Can you pick a number between {low} and {high}?", "Choose a number from {low} to {high}.",
         "Generate a random number between {low} and {high}.", "A random number from {low} to {high}, please.",
         "Get a random number between {low} and {high}.", "Choose a random number between {low} and {high}.",
         "Draw a number between {low} and {high}.", "I need a random number from {low} to {high}.")),
    "convert": Wording(
        "convert|change|transform", "units|a value from one unit to another|a value to another unit|measurements|"
        "an amount between units|units of measure|a quantity into another unit",
        ("Change {value} {source} to {target}.", "Can you convert {value} {source} to {target}?",
         "{value} {source} in {target}", "Express {value} {source} in {target}.",
         "What's {value} {source} in {target}?",
         "Convert {value} {source} into {target}.", "How many {target} make {value} {source}?",
         "I have {value} {source}. How much is that in {target}?")),
    "currency": Wording(
        "convert|exchange|change", "money|an amount from one currency to another|currencies|money between currencies|"
        "an amount of money into another currency|a sum of money",
        ("Change {value} {source} to {target}.", "Can you convert {value} {source} to {target}?",
         "{value} {source} in {target}", "How many {target} do I get for {value} {source}?",
         "What is {value} {source} in {target}?", "Convert {value} {source} into {target}.",
         "I have {value} {source}. How much is that in {target}?")),
    "message": Wording(
        "send|write|post|deliver", "a message|an email|a message to someone|a text message|a mail to a person|"
        "an email to a contact|a text to someone|a short message to a person|a chat message",
        ("Please send {to} a message: {text}", "Can you write to {to}: {text}", "Message {to}: {text}",
         'Tell {to} "{text}".', 'Write "{text}" to {to}.', "Email {to}: {text}", "Let {to} know: {text}",
         'Send a message to {to} that says "{text}".', "Send an email to {to}: {text}", "Send {to} an email: {text}",
         "Send a text to {to}: {text}", "Please tell {to}: {text}", 'Please write "{text}" to {to}.')),
    "timer": Wording(
        "set|start|create|run", "a timer|a timer for some minutes|a countdown|a timer in minutes|a kitchen timer|"
        "a timer for a number of minutes|a countdown of some minutes",
        ("Can you set a timer for {minutes} minutes?", "I need a timer for {minutes} minutes.",
         "Set the timer to {minutes} minutes.", "Start a timer for {minutes} minutes.", "{minutes} minutes timer",
         "Please start a timer of {minutes} minutes.", "Create a timer of {minutes} minutes.",
         "Start a countdown of {minutes} minutes.", "Tell me when {minutes} minutes are over.",
         "Set a {minutes} minute timer.")),
    "remind": Wording(
        "set|create|add|make", "a reminder|a reminder at a time|an alarm with a text|an event|a reminder for a task|"
        "an entry in the calendar|an appointment",
        ("Create a reminder at {time}: {text}", "Please remind me at {time}: {text}",
         "Remind me of this at {time}: {text}",
         'Can you remind me at {time} that "{text}"?', "Add a reminder for {time}: {text}",
         "Reminder at {time}: {text}",
         "I want a reminder at {time}: {text}", 'At {time} tell me "{text}".')),
    "translate": Wording(
        "translate", "text|a text|a text into another language|a sentence|words into a language|a phrase",
        ('Can you translate "{text}" into {language}?', 'Please translate "{text}" to {language}.',
         '"{text}" in {language}', "Say this in {language}: {text}", 'Translate "{text}" to {language}.',
         'What does "{text}" mean in {language}?', "Put this into {language}: {text}", "In {language}: {text}",
         'How is "{text}" said in {language}?')),
    "light": Wording(
        "turn on or off|switch|control|set|change", "a light|the lights|the light of a room|the lamp in a room|lights",
        ("Can you turn {state} the light in the {room}?", "Please switch {state} the {room} light.",
         "Turn {state} the lights in the {room}.", "Turn the {room} lights {state}.", "Lights {state} in the {room}!",
         "Please turn the light in the {room} {state}.", "Switch the lamp in the {room} {state}.",
         "I want the light in the {room} {state}.", "Put the light {state} in the {room}.")),
    "stock": Wording(
        _GET, "the price of a stock|the stock price|the current price of a share|a stock quote|the price of a ticker|"
        "the latest stock price of a company|the value of a share",
        ("How much is {symbol}?", "What does {symbol} cost?", "Give me the stock price of {symbol}.",
         "{symbol} stock price",
         "What is the price of {symbol}?", "Can you check the price of {symbol}?", "How is {symbol} doing?",
         "What does a share of {symbol} cost?", "Tell me the price of {symbol} stock.", "What is {symbol} trading at?",
         "Show me the price of {symbol}.")),
    "music": Wording(
        "play|start|stream|put on", "a song|music|a track|a song by its title|some music|a piece of music",
        ("Can you play {title}?", "Start {title}.", "Let me hear {title}.", "Play me {title}.", "Stream {title}.",
         "I would like to hear {title}.", "Play the track {title}.", "Please put on {title}.", "Play some {title}.",
         "I want to listen to {title}.")),
    "order": Wording(
        "order|buy|purchase", "a product|some items|an item|food|goods|things from the shop|a number of items",
        ("Can you order {quantity} {item}?", "Please buy {quantity} {item}.", "I would like {quantity} {item}.",
         "I need {quantity} {item}.", "Purchase {quantity} {item}.", "Put {quantity} {item} in the cart.",
         "Buy me {quantity} {item}.", "I want to order {quantity} {item}.", "Get {quantity} {item}.")),
    "delivery": Wording(
        _GET, "the delivery date of an order|the status of an order|where a package is|the state of a parcel|"
        "the delivery date for a customer's order|the tracking status of a package|when an order arrives",
        ("When will order {id} arrive?", "Can you track {id}?", "Has order {id} been sent?", "When is {id} delivered?",
         "What is the status of order {id}?", "Please check order {id}.", "Where is the package {id} now?",
         "What happened to order {id}?", "When does my package {id} come?", "Track the package {id}.",
         "My order number is {id}. When will it arrive?")),
    "distance": Wording(
        _GET, "the distance between two cities|the distance from one place to another|the way between two places|"
        "directions between two places|the route from one city to another|how far two places are apart",
        ("How far is {destination} away from {origin}?", "What's the distance from {origin} to {destination}?",
         "Distance from {origin} to {destination}", "How long is the way from {origin} to {destination}?",
         "Find the route from {origin} to {destination}.", "Give me the way from {origin} to {destination}.",
         "What is the way from {origin} to {destination}?", "Directions from {origin} to {destination}, please.")),
    "flight": Wording(
        "book|find|search|reserve|get", "a flight|a flight between two cities|a ticket|a train on a day|flights|"
        "a flight from one city to another|a seat on a flight",
        ("Can you book a flight from {origin} to {destination} on {day}?",
         "I need a flight from {origin} to {destination} on {day}.",
         "Flight from {origin} to {destination} on {day}, please.",
         "Please book me a flight from {origin} to {destination} for {day}.",
         "I want to fly from {origin} to {destination} on {day}.",
         "Reserve a flight from {origin} to {destination} on {day}.",
         "On {day} I want to fly from {origin} to {destination}.")),
    "table": Wording(
        "book|reserve", "a table|a table in a restaurant|a table for some people|a restaurant|a place to eat",
        ("Can you book a table for {people} at {time}?", "I need a table for {people} at {time}.",
         "Please reserve a table for {people} at {time}.", "We are {people} people. Book a table at {time}.",
         "Table for {people} at {time}", "Book us a table for {people} people at {time}.",
         "Reserve for {people} people at {time}.")),
    "horoscope": Wording(
        _GET, "the horoscope of a sign|today's horoscope|the horoscope for a zodiac sign|a horoscope|"
        "today's horoscope for an astrological sign|what the stars say for a sign",
        ("What's my horoscope? I'm {sign}.", "I am {sign}. What is my horoscope?", "{sign} horoscope",
         "Give me the horoscope for {sign}.", "What is the horoscope of {sign} today?",
         "Read me the horoscope for {sign}.",
         "What do the stars say for {sign}?", "What is today's horoscope for {sign}?",
         "Can you get the horoscope of {sign}?")),
    "file": Wording(
        "read|open|load|show|return",
         "a file|the content of a file|a text file|a file by its path|a file from the disk|"
        "the text of a file|the file at a path",
        ("Can you open {path}?", "Please read {path}.", "What does the file {path} contain?", "Load {path}.",
         "Open the file {path}.", "Give me the content of {path}.", "What is written in {path}?", "Read {path}.",
         "Print the file {path}.", "What's in {path}?")),
    "user": Wording(
        _GET, "a user|a user by name|the data of a user|a customer|a person by name|information about a user|"
        "an employee|the entry of a person|a contact by name",
        ("Can you find the user {name}?", "Get the user {name}.", "Look up the customer {name}.",
         "Show me the data of {name}.", "What is known about {name}?", "Find the customer {name}.",
         "Give me the entry of {name}.", "Is there a user called {name}?", "Fetch the user {name}.")),
    "note": Wording(
        "save|add|write|create|store", "a note|a text|an entry|a note with a text|an item to the list|a memo|a todo",
        ("Make a note: {text}", "Please write down: {text}", "Take a note: {text}", "Write down: {text}",
         'Save "{text}" as a note.', 'Please note "{text}".', "Add a note: {text}", "Store this: {text}",
         'Add "{text}" to my notes.')),
}  # fmt: skip

# What documentation shows is never held out.
_ALWAYS_TRAINED = {
    "The weather in a city.", "Get the weather in a city.", "Get the current weather in a city.", "The time in a city.",
    "Get current temperature for a given location.", "What is the weather like in {place}?", "Add two numbers.",
    "What is the weather in {place}?", "Set a timer for {minutes} minutes.",
}  # fmt: skip
_DOUBLED = {"get", "set", "put", "flip"}


def third_person(phrase: str) -> str:
    """ "look up" becomes "looks up"."""
    verb, *rest = phrase.split(" ")
    if verb.endswith(("ch", "sh", "ss", "x", "o")):
        verb += "es"
    elif verb.endswith("y") and verb[-2] not in "aeiou":
        verb = verb[:-1] + "ies"
    else:
        verb += "s"
    return " ".join((verb, *rest))


def gerund(phrase: str) -> str:
    """ "look up" becomes "looking up"."""
    verb, *rest = phrase.split(" ")
    if verb in _DOUBLED:
        verb += verb[-1]
    elif verb.endswith("e"):
        verb = verb[:-1]
    return " ".join((f"{verb}ing", *rest))


def _stated(verb: str, thing: str) -> str:
    return f"{verb} {thing}"


# How a description says that a tool does `verb` to `thing`; the first ones are the usual ones.
_STYLES: tuple[tuple[float, Callable[[str, str], str]], ...] = (
    (6.0, _stated),
    (5.0, lambda verb, thing: thing),
    (4.0, lambda verb, thing: _stated(third_person(verb), thing)),
    (1.5, lambda verb, thing: f"use this to {verb} {thing}"),
    (1.0, lambda verb, thing: f"use this tool to {verb} {thing}"),
    (1.0, lambda verb, thing: f"useful for {gerund(verb)} {thing}"),
    (0.7, lambda verb, thing: f"useful to {verb} {thing}"),
    (1.0, lambda verb, thing: f"a tool to {verb} {thing}"),
    (0.7, lambda verb, thing: f"a tool that {third_person(verb)} {thing}"),
    (0.7, lambda verb, thing: f"a function that {third_person(verb)} {thing}"),
    (0.7, lambda verb, thing: f"tool for {gerund(verb)} {thing}"),
    (0.7, lambda verb, thing: f"this tool {third_person(verb)} {thing}"),
    (0.7, lambda verb, thing: f"call this to {verb} {thing}"),
    (0.7, lambda verb, thing: f"call this when the user wants to {verb} {thing}"),
    (0.7, lambda verb, thing: f"lets you {verb} {thing}"),
    (0.7, lambda verb, thing: f"can {verb} {thing}"),
)
_TAILS = (" Returns text.", " Returns JSON.", " Call this whenever you need it.", " Use it when asked.",
          " Works for all of them.", " Never guess.", " Returns a short answer.")  # fmt: skip


def _is_unseen(text: str) -> bool:
    """One in six, of those that documentation does not show."""
    return text not in _ALWAYS_TRAINED and (is_held_out(f"wording {text}") or is_held_out(f"words {text}"))


def describe(name: str, rng: Random, *, held_out: bool) -> str:
    """A description of one line for a tool of the skill `name`."""
    wording = WORDINGS[name]
    while True:
        verb, thing = rng.choice(wording.verbs.split("|")), rng.choice(wording.things.split("|"))
        (style,) = rng.choices([style for _, style in _STYLES], [share for share, _ in _STYLES])
        line = sentence_case(style(verb, thing)) + "."
        if _is_unseen(line) is held_out:
            break
    choice = rng.random()
    if choice < 0.08:
        return line + rng.choice(_TAILS)
    if choice < 0.4:
        return line.rstrip(".")
    return line[:1].lower() + line[1:].rstrip(".") if choice < 0.48 else line


def ways_to_ask(name: str, *, held_out: bool) -> tuple[str, ...]:
    return tuple(text for text in WORDINGS[name].asks if _is_unseen(text) is held_out)


_PLACE_NOTES = (
    "The city and state, e.g. San Francisco, CA", "The city", "The name of the city", "City and country",
    "City and country e.g. Bogota, Colombia", "A city, such as Paris", "The city to look up", "Name of the place",
)  # fmt: skip


def describe_parameter(parameter: str, role: str, rng: Random) -> str:
    if role in ("place", "origin", "destination") and rng.random() < 0.6:
        return rng.choice(_PLACE_NOTES)
    words = parameter.replace("_", " ")
    note = rng.choice(("The {}", "{}", "The {} to use", "{} of it", "The {} as given", "Which {}", "the {}", "A {}"))
    return sentence_case(note.format(words)) + rng.choice(("", "", "."))
