"""What tools there are: how they are named, what they take, how users ask for them and what they return.

A skill is a family of tools: each draw gives another name, description and names of parameters.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from assets.training.questions import CAPITALS, COLOURS, DAYS, NAMES, WORDS, is_held_out, made_up_word
from assets.training.tools import CallValue, ParameterType, Tool

_CITIES = (
    *CAPITALS.values(), "New York", "San Francisco", "Los Angeles", "Boston", "Chicago", "Seattle", "Toronto", "Munich",
    "Hamburg", "Barcelona", "Milan", "Venice", "Zurich", "Geneva", "Prague", "Mumbai", "Shanghai", "Sydney", "Bogota",
    "San Francisco, CA", "Paris, France", "London, UK", "Boston, MA", "New York, NY", "Tokyo, Japan", "Berlin, Germany",
    "San Diego", "Las Vegas", "Miami", "Dallas", "Austin", "Denver", "Lyon", "Naples", "Porto", "Osaka", "Kyoto",
)  # fmt: skip
_TOPICS = (
    "black holes", "cheap flights", "healthy recipes", "electric cars", "the French Revolution", "good books",
    "machine learning", "open source software", "football results", "quantum physics", "language models", "history",
    "the tallest mountain", "hotels near the lake", "news about space", "jazz music", "climate change", "Python lists",
    "how to bake bread", "the weather on Mars", "garden tools", "train times", "a birthday present", "deep learning",
)  # fmt: skip
_SENTENCES = (
    "I will be late", "Dinner is ready", "See you tomorrow", "Please call me", "The train is late", "Happy birthday",
    "Buy some milk", "The meeting is at noon", "I am on my way", "Good luck", "Water the flowers",
    "Thank you for the book", "Where are you", "The house is sold", "Come home soon", "We won the game",
    "The key is under the stone",
)  # fmt: skip
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Japanese", "Dutch", "Polish", "Greek", "Swedish", "Chinese")
_ROOMS = ("kitchen", "bedroom", "bathroom", "garden", "office", "hall", "garage", "living room", "cellar")
_CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CHF", "CAD", "AUD", "SEK")
_UNITS = ("km", "miles", "meters", "feet", "kg", "pounds", "grams", "liters", "gallons", "inches", "cm", "hours")
_SIGNS = ("Aquarius", "Aries", "Leo", "Virgo", "Libra", "Scorpio", "Gemini", "Taurus", "Pisces", "Cancer")
_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "clear", "foggy", "partly cloudy")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def strange_word(rng: Random) -> str:
    """Letters in an order that no list has, so that copying letter by letter is learnt."""
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(2, 7)))


def any_word(rng: Random) -> str:
    choice = rng.random()
    if choice < 0.45:
        return rng.choice(WORDS)
    if choice < 0.85:
        return made_up_word(rng)
    return made_up_word(rng) + made_up_word(rng) if choice < 0.92 else strange_word(rng)


def _phrase(rng: Random, most: int = 4) -> str:
    return " ".join(any_word(rng) for _ in range(rng.randint(1, most)))


def place(rng: Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(_CITIES)
    name = any_word(rng).title()
    return f"{rng.choice(('New', 'San', 'Port', 'East'))} {name}" if rng.random() < 0.15 else name


def person(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.5 else any_word(rng).title()


def topic(rng: Random) -> str:
    return rng.choice(_TOPICS) if rng.random() < 0.4 else _phrase(rng)


def sentence(rng: Random) -> str:
    return rng.choice(_SENTENCES) if rng.random() < 0.5 else _phrase(rng, 5)


def number(rng: Random) -> int:
    """Of any length, since numbers are only copied."""
    return rng.randrange(10 ** rng.randint(1, 4))


def small_number(rng: Random) -> int:
    return rng.randint(1, 30)


def amount(rng: Random) -> int | float:
    return number(rng) + 1 if rng.random() < 0.75 else round(rng.uniform(0.1, 99), rng.randint(1, 2))


def identifier(rng: Random) -> str:
    digits = str(rng.randrange(10 ** rng.randint(2, 6)))
    return (
        rng.choice(("order_", "A-", "ID", "", "X", f"{strange_word(rng)}_", f"{strange_word(rng).upper()}-")) + digits
    )


def clock(rng: Random) -> str:
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}"


def file_name(rng: Random) -> str:
    folder = f"{any_word(rng)}/" if rng.random() < 0.3 else ""
    return f"{folder}{any_word(rng)}.{rng.choice(('txt', 'md', 'py', 'json', 'csv', 'log'))}"


def ticker(rng: Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(("AAPL", "MSFT", "GOOG", "TSLA", "NVDA", "AMZN"))
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(3, 4))).upper()


def expression(rng: Random) -> str:
    text = str(number(rng))
    for _ in range(rng.choice((1, 1, 2))):
        text += f" {rng.choice('+-*/')} {number(rng)}"
    return text


def _one_of(*values: str) -> Callable[[Random], str]:
    return lambda rng: rng.choice(values)


@dataclass(frozen=True, slots=True)
class Role:
    """A parameter by its part in the question; `names` are what tools call it."""

    names: tuple[str, ...]
    draw: Callable[[Random], CallValue]
    kind: ParameterType = "string"


def _weather_result(rng: Random) -> str | dict[str, CallValue]:
    degrees, sky = rng.randint(-9, 39), rng.choice(_SKIES)
    match rng.randrange(6):
        case 0:
            return f"{sky}, {degrees} degrees"
        case 1:
            return f"{degrees} degrees and {sky}"
        case 2:
            return {"temperature": degrees, rng.choice(("condition", "conditions", "description", "weather")): sky}
        case 3:
            return {"temperature": degrees, "unit": rng.choice(("celsius", "fahrenheit", "C", "F"))}
        case 4:
            return {rng.choice(("temperature", "temp", "temp_c")): degrees}
        case _:
            return rng.choice((str(degrees), f"{degrees}°C", f"{degrees} C", sky))


def _number_result(rng: Random) -> str | dict[str, CallValue]:
    value = amount(rng)
    return {rng.choice(("result", "value", "answer", "total")): value} if rng.random() < 0.3 else str(value)


def _text_result(rng: Random) -> str | dict[str, CallValue]:
    text = _phrase(rng)
    return {rng.choice(("result", "text", "title", "answer")): text} if rng.random() < 0.4 else text


def _clock_result(rng: Random) -> str | dict[str, CallValue]:
    return {"time": clock(rng)} if rng.random() < 0.3 else clock(rng)


def _done(rng: Random) -> str | dict[str, CallValue]:
    if rng.random() < 0.4:
        return {"status": rng.choice(("ok", "done", "sent", "success", any_word(rng)))}
    return rng.choice(DONE)


DONE = ("ok", "done", "success", "true", "OK", "Done", "null")


@dataclass(frozen=True, slots=True)
class Skill:
    """`topic` is what the answer speaks about once a result is there; questions name the roles that they fill in.

    Attributes:
        verbs, nouns: A name is a verb and a noun, or a noun alone where a verb is empty. `|` separates what may stand.
        narrow: No question of the old kinds could be meant for this tool.
    """

    verbs: str
    nouns: str
    descriptions: tuple[str, ...]
    roles: Mapping[str, Role]
    questions: tuple[str, ...]
    topic: str
    result: Callable[[Random], str | dict[str, CallValue]]
    narrow: bool = True


_PLACE = Role(("location", "city", "place", "town", "location", "city_name", "where"), place)
_A = Role(("a", "x", "first", "num1", "first_number", "left", "number1", "n1"), amount, "number")
_B = Role(("b", "y", "second", "num2", "second_number", "right", "number2", "n2"), amount, "number")


def _arithmetic(verbs: str, nouns: str, descriptions: tuple[str, ...], questions: tuple[str, ...]) -> Skill:
    return Skill(verbs, nouns, descriptions, {"a": _A, "b": _B}, questions, "The result", _number_result, narrow=False)


SKILLS: dict[str, Skill] = {
    "weather": Skill(
        "get|fetch|check|find|lookup|show|get current|",
        "weather|current weather|weather report|forecast|weather info|temperature|weather data|weather forecast|"
        "climate",
        ("Get the current weather in a given location", "Get the weather for a city.", "Returns the current weather.",
         "Get current temperature for a given location.", "Look up the weather of a place.", "Weather in a city",
         "Get the current temperature for a specific location", "Get weather for the given city."),
        {"place": _PLACE, "unit": Role(("unit", "units", "scale"), _one_of("celsius", "fahrenheit"),
                                      ("celsius", "fahrenheit"))},
        ("What is the weather in {place}?", "What's the weather in {place}?", "How is the weather in {place}?",
         "What is the weather like in {place}?", "What's the weather like in {place}?", "Weather in {place}?",
         "What is the weather like in {place} today?", "What's the weather like in {place} today?",
         "What's the temperature in {place}?", "How warm is it in {place}?", "Tell me the weather in {place}.",
         "Is it raining in {place}?", "Is it cold in {place}?", "Do I need an umbrella in {place}?",
         "Get the weather for {place}.", "What is the temperature in {place} in {unit}?",
         "What is the weather in {place} in {unit}?", "How warm is it in {place} in {unit}?",
         "What's the weather like in {place} in {unit}?", "Tell me the weather in {place} in {unit}.",
         "What is the weather going to be like in {place}?", "What's the weather in {place} right now?"),
        "The weather in {place}", _weather_result),
    "time": Skill(
        "get|fetch|check|find|lookup|tell|get current|", "time|local time|current time|clock|time of city|hour",
        ("Get the current time in a city.", "Returns the local time of a place.", "The time in a given location",
         "Look up what time it is somewhere."),
        {"place": _PLACE},
        ("What time is it in {place}?", "What is the time in {place}?", "Tell me the time in {place}.",
         "What's the local time in {place}?", "How late is it in {place}?", "Time in {place}?",
         "What time is it in {place} right now?"),
        "The time in {place}", _clock_result),
    "now": Skill(
        "get|fetch|check|read|get current|", "time|date|current time|clock|today|now|datetime",
        ("Get the current time.", "Returns the date and time.", "What time it is now", "The current date"), {},
        ("What time is it?", "What is the time?", "Tell me the time.", "What time is it now?", "What's the time?",
         "What is the date today?", "What is today's date?", "Which date is it today?"),
        "The time", _clock_result),
    "population": Skill(
        "get|fetch|find|lookup|count|", "population|inhabitants|city population|people|residents|population of",
        ("Get the number of people in a city.", "Returns the population of a place.", "Population of a city"),
        {"place": _PLACE},
        ("How many people live in {place}?", "What is the population of {place}?", "How big is {place}?",
         "Tell me the population of {place}.", "How many inhabitants does {place} have?"),
        "The population of {place}", _number_result),
    "add": _arithmetic(
        "add|sum|plus|calculate sum|compute sum|add up", "|two numbers|numbers|integers|values|of numbers",
        ("Add two numbers.", "Adds a and b.", "Returns the sum of two numbers.", "Add two integers.", "Sum of numbers"),
        ("What is {a} + {b}?", "Add {a} and {b}.", "What is {a} plus {b}?", "How much is {a} + {b}?", "{a} + {b}",
         "What is the sum of {a} and {b}?", "Calculate {a} + {b}.", "What's {a} + {b}?")),
    "subtract": _arithmetic(
        "subtract|minus|difference|compute difference|sub|take away", "|two numbers|numbers|integers|values",
        ("Subtract two numbers.", "Subtracts b from a.", "Returns the difference of two numbers."),
        ("What is {a} - {b}?", "Subtract {b} from {a}.", "What is {a} minus {b}?", "How much is {a} - {b}?",
         "Calculate {a} - {b}.", "{a} - {b}", "What's {a} minus {b}?")),
    "multiply": _arithmetic(
        "multiply|product|times|mul|compute product|calculate product", "|two numbers|numbers|integers|values",
        ("Multiply two numbers.", "Multiplies a and b.", "Returns the product of two numbers.",
         "Multiply two integers together."),
        ("What is {a} * {b}?", "Multiply {a} by {b}.", "What is {a} times {b}?", "Multiply {a} and {b}.", "{a} * {b}",
         "How much is {a} * {b}?", "Calculate {a} * {b}.", "What's {a} times {b}?")),
    "divide": _arithmetic(
        "divide|quotient|div|compute quotient|ratio", "|two numbers|numbers|integers|values",
        ("Divide two numbers.", "Divides a by b.", "Returns the quotient of two numbers."),
        ("What is {a} / {b}?", "Divide {a} by {b}.", "What is {a} divided by {b}?", "How much is {a} / {b}?",
         "Calculate {a} / {b}.", "{a} / {b}")),
    "calculate": Skill(
        "calculate|evaluate|compute|solve|run|do|", "expression|calculator|math|formula|arithmetic|calculation",
        ("Evaluate a mathematical expression.", "A simple calculator.", "Calculates the value of an expression.",
         "Useful for math", "Calculate an arithmetic expression"),
        {"expression": Role(("expression", "expr", "formula", "input", "math", "calculation"), expression)},
        ("What is {expression}?", "Calculate {expression}.", "How much is {expression}?", "Evaluate {expression}.",
         "Compute {expression}.", "{expression}", "What's {expression}?", "Solve {expression}."),
        "The result", _number_result, narrow=False),
    "search": Skill(
        "search|web search|find|query|lookup|google|browse",
        "|web|internet|wikipedia|documents|pages|articles|wiki|docs",
        ("Search the web.", "Search the web for information.", "Find pages about a topic.", "Looks up a query online.",
         "Search Wikipedia for a topic", "Searches the documents."),
        {"query": Role(("query", "q", "search", "text", "topic", "keywords", "search_query", "question"), topic)},
        ("Search for {query}.", "Search the web for {query}.", "Look up {query}.", "Find something about {query}.",
         "Find information about {query}.", "Google {query}.", "Please search for {query}.", "Find {query}.",
         "Can you look up {query}?", "Search the internet for {query}."),
        "The result", _text_result, narrow=False),
    "dice": Skill(
        "roll|throw|toss|cast", "dice|die|the dice|a die|random dice|some dice",
        ("Roll dice.", "Rolls some dice with a number of sides.", "Throw dice and return the sum."),
        {"count": Role(("count", "n", "dice", "number", "num_dice", "times"), small_number, "integer"),
         "sides": Role(("sides", "faces", "num_sides", "max_value"), small_number, "integer")},
        ("Roll {count} dice with {sides} sides.", "Throw {count} dice that have {sides} sides.", "Roll {count} dice.",
         "Please roll {count} dice with {sides} sides.", "Throw {count} dice.", "Roll a die with {sides} sides."),
        "The result", _number_result),
    "coin": Skill(
        "flip|toss|throw", "coin|a coin|the coin|random coin", ("Flip a coin.", "Tosses a coin: heads or tails."), {},
        ("Flip a coin.", "Toss a coin.", "Heads or tails?", "Please flip a coin.", "Throw a coin for me."),
        "The result", _one_of("heads", "tails")),
    "random": Skill(
        "get|pick|draw|generate|make|", "random number|random integer|random int|number between|random",
        ("Get a random number.", "Returns a random integer between two limits.", "Draws a number in a range."),
        {"low": Role(("min", "low", "start", "minimum", "lower"), number, "integer"),
         "high": Role(("max", "high", "end", "maximum", "upper"), number, "integer")},
        ("Give me a random number between {low} and {high}.", "Pick a number between {low} and {high}.",
         "Draw a random number from {low} to {high}.", "Random number between {low} and {high}?"),
        "The result", _number_result),
    "convert": Skill(
        "convert|change|transform|", "units|unit|measure|value|quantity|unit converter|measurement",
        ("Convert a value from one unit to another.", "Converts units.", "Unit conversion"),
        {"value": Role(("value", "amount", "quantity", "number"), amount, "number"),
         "source": Role(("from_unit", "from", "source", "unit_from", "source_unit"), _one_of(*_UNITS)),
         "target": Role(("to_unit", "to", "target", "unit_to", "target_unit"), _one_of(*_UNITS))},
        ("Convert {value} {source} to {target}.", "How many {target} are {value} {source}?",
         "What is {value} {source} in {target}?", "How much is {value} {source} in {target}?",
         "Please convert {value} {source} into {target}."),
        "The result", _number_result),
    "currency": Skill(
        "convert|exchange|change|", "currency|money|currencies|exchange rate|cash",
        ("Convert money from one currency to another.", "Converts an amount between currencies.", "Exchange money"),
        {"value": Role(("amount", "value", "money", "sum"), amount, "number"),
         "source": Role(("from_currency", "from", "source", "base", "currency_from"), _one_of(*_CURRENCIES)),
         "target": Role(("to_currency", "to", "target", "quote", "currency_to"), _one_of(*_CURRENCIES))},
        ("Convert {value} {source} to {target}.", "How much is {value} {source} in {target}?",
         "What are {value} {source} in {target}?", "Exchange {value} {source} for {target}."),
        "The result", _number_result),
    "message": Skill(
        "send|write|post|deliver", "message|email|text|mail|sms|note|chat message",
        ("Send a message to someone.", "Sends an email.", "Send a text to a person.", "Write to a contact"),
        {"to": Role(("to", "recipient", "name", "person", "receiver", "contact"), person),
         "text": Role(("text", "message", "body", "content", "msg"), sentence)},
        ("Send {to} the message: {text}", "Send a message to {to}: {text}", "Write to {to}: {text}",
         "Tell {to}: {text}", 'Send "{text}" to {to}.', "Send an email to {to} that says: {text}",
         "Text {to}: {text}"),
        "The message", _done),
    "timer": Skill(
        "set|start|create|run", "timer|a timer|countdown|egg timer|kitchen timer",
        ("Set a timer.", "Starts a timer for some minutes.", "Start a countdown of minutes"),
        {"minutes": Role(("minutes", "duration", "time", "mins", "length", "duration_minutes"), small_number,
                         "integer")},
        ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "Timer for {minutes} minutes.",
         "Please set a timer for {minutes} minutes.", "Wake me in {minutes} minutes."),
        "The timer", _done),
    "remind": Skill(
        "set|create|add|make|", "reminder|alarm|alert|event|task|appointment",
        ("Set a reminder.", "Creates a reminder at a time.", "Add a reminder with a text and a time."),
        {"text": Role(("text", "title", "task", "message", "what", "reminder"), sentence),
         "time": Role(("time", "at", "when", "hour", "start_time"), clock)},
        ("Remind me at {time}: {text}", "At {time} remind me: {text}", "Set a reminder for {time}: {text}",
         'Remind me of "{text}" at {time}.'),
        "The reminder", _done),
    "translate": Skill(
        "translate|convert|", "text|translate text|language|sentence|phrase|translator|translation",
        ("Translate text.", "Translates a text into another language.", "Translation of a sentence"),
        {"text": Role(("text", "sentence", "input", "phrase", "content"), sentence),
         "language": Role(("language", "target_language", "to", "lang", "target"), _one_of(*_LANGUAGES))},
        ("Translate into {language}: {text}", 'Translate "{text}" into {language}.',
         'How do you say "{text}" in {language}?',
         "Translate this to {language}: {text}", 'What is "{text}" in {language}?'),
        "The translation", _text_result),
    "light": Skill(
        "set|turn|switch|control|change", "light|lamp|lights|room light|smart light|light state",
        ("Turn a light on or off.", "Switches the light of a room.", "Control the lights"),
        {"room": Role(("room", "location", "where", "area", "place"), _one_of(*_ROOMS)),
         "state": Role(("state", "status", "power", "value"), _one_of("on", "off"), ("on", "off"))},
        ("Turn {state} the light in the {room}.", "Turn the light in the {room} {state}.",
         "Switch {state} the light in the {room}.", "Switch the {room} light {state}.", "Light {state} in the {room}."),
        "The light", _done),
    "stock": Skill(
        "get|fetch|check|lookup|", "stock price|stock|share price|quote|price of stock|ticker",
        ("Get the price of a stock.", "Returns the current stock price.", "Stock price by ticker"),
        {"symbol": Role(("symbol", "ticker", "stock", "name", "company"), ticker)},
        ("What is the stock price of {symbol}?", "What is {symbol} worth?", "Price of {symbol}?",
         "What's the stock price of {symbol}?", "How much is a share of {symbol}?", "Get the stock price of {symbol}."),
        "The price of {symbol}", _number_result),
    "music": Skill(
        "play|start|find|stream", "music|song|track|a song|media|tune",
        ("Play a song.", "Plays music.", "Start a song by its title.", "Play a track"),
        {"title": Role(("title", "song", "name", "track", "query", "song_name"), topic)},
        ("Play {title}.", "Play the song {title}.", "I want to hear {title}.", "Please play {title}.",
         "Put on {title}."),
        "The song", _done),
    "order": Skill(
        "order|buy|add|purchase|put", "item|product|to cart|goods|things|food|pizza",
        ("Order a product.", "Buys some items.", "Add an item to the cart.", "Order food"),
        {"quantity": Role(("quantity", "count", "number", "amount", "qty"), small_number, "integer"),
         "item": Role(("item", "product", "name", "article", "thing"), any_word)},
        ("Order {quantity} {item}.", "Buy {quantity} {item}.", "I want {quantity} {item}.",
         "Please order {quantity} {item}.", "Add {quantity} {item} to the cart.", "Get me {quantity} {item}."),
        "The order", _done),
    "delivery": Skill(
        "get|check|track|find|lookup", "delivery date|order|order status|package|parcel|shipment|invoice",
        ("Get the delivery date of an order.", "Returns the status of an order.", "Track a package by its id",
         "Get the delivery date for a customer's order."),
        {"id": Role(("order_id", "id", "number", "order", "code", "tracking_number"), identifier)},
        ("Where is my order {id}?", "When does order {id} arrive?", "Track order {id}.", "What is the status of {id}?",
         "Where is package {id}?", "My order is {id}. Where is it?", "Check order {id}."),
        "The order {id}", _text_result),
    "distance": Skill(
        "get|compute|find|measure|calculate|plan|", "distance|route|way|travel time|directions|trip",
        ("Get the distance between two cities.", "Finds the way from one place to another.", "Route between places"),
        {"origin": Role(("origin", "from", "start", "source", "from_city", "departure"), place),
         "destination": Role(("destination", "to", "end", "target", "to_city", "arrival"), place)},
        ("How far is it from {origin} to {destination}?", "What is the distance from {origin} to {destination}?",
         "How do I get from {origin} to {destination}?", "Show me the way from {origin} to {destination}.",
         "How far is {destination} from {origin}?"),
        "The distance from {origin} to {destination}", _number_result),
    "flight": Skill(
        "book|find|search|reserve|get", "flight|flights|train|ticket|a trip|bus",
        ("Book a flight.", "Finds a flight between two cities on a day.", "Reserve a ticket"),
        {"origin": Role(("origin", "from", "from_city", "departure", "start"), place),
         "destination": Role(("destination", "to", "to_city", "arrival", "end"), place),
         "day": Role(("day", "date", "when", "departure_day"), _one_of(*DAYS))},
        ("Book a flight from {origin} to {destination} on {day}.",
         "I want to go from {origin} to {destination} on {day}.",
         "Find a flight to {destination} from {origin} on {day}.", "Get me from {origin} to {destination} on {day}.",
         "On {day} I travel from {origin} to {destination}."),
        "The flight", _text_result),
    "table": Skill(
        "book|reserve|make|create", "table|reservation|restaurant|a table|booking|dinner",
        ("Book a table.", "Reserves a table in a restaurant.", "Make a reservation"),
        {"people": Role(("people", "guests", "persons", "party_size", "size"), small_number, "integer"),
         "time": Role(("time", "at", "when", "hour"), clock)},
        ("Book a table for {people} at {time}.", "Reserve a table for {people} people at {time}.",
         "A table for {people} at {time}, please.", "At {time} I need a table for {people} people."),
        "The table", _done),
    "horoscope": Skill(
        "get|read|fetch|tell|", "horoscope|horoscope today|star sign|zodiac|daily horoscope",
        ("Get today's horoscope for an astrological sign.", "Returns the horoscope of a sign.", "Horoscope"),
        {"sign": Role(("sign", "zodiac", "star_sign", "name"), _one_of(*_SIGNS))},
        ("What is my horoscope? I am an {sign}.", "What is my horoscope? I am a {sign}.", "Horoscope for {sign}?",
         "Tell me the horoscope of {sign}.", "I am a {sign}. What do the stars say?"),
        "The horoscope for {sign}", _text_result),
    "file": Skill(
        "read|open|load|show|get|cat", "file|text file|document|file content|contents|path",
        ("Read a file.", "Returns the content of a file.", "Open a file by its path"),
        {"path": Role(("path", "file", "filename", "name", "file_path", "file_name"), file_name)},
        ("Read the file {path}.", "Open {path}.", "What is in {path}?", "Show me {path}.",
         "Show the content of {path}.", "What does {path} say?"),
        "The content of {path}", _text_result),
    "user": Skill(
        "get|find|lookup|fetch|load", "user|customer|person|contact|employee|account|user info|phone number",
        ("Get a user by name.", "Looks up a person.", "Find a customer", "Returns the data of a user."),
        {"name": Role(("name", "user", "username", "person", "customer", "user_name"), person)},
        ("Find the user {name}.", "Who is {name}?", "Look up {name}.", "What do we know about {name}?",
         "Get the data of {name}.", "Find {name} in the list of users."),
        "The entry of {name}", _text_result),
    "note": Skill(
        "save|add|write|create|store|remember", "note|memo|todo|a note|entry|item to list",
        ("Save a note.", "Writes a note.", "Add an entry to the list.", "Stores a text."),
        {"text": Role(("text", "note", "content", "body", "entry", "value"), sentence)},
        ("Write a note: {text}", "Save this note: {text}", "Note: {text}",
         "Add to my list: {text}", "Remember: {text}"),
        "The note", _done),
}  # fmt: skip

_MADE_UP_VERBS = (
    "check",
    "scan",
    "paint",
    "count",
    "open",
    "start",
    "clean",
    "move",
    "test",
    "sort",
    "load",
    "measure",
)
_MADE_UP_KINDS: tuple[tuple[ParameterType, Callable[[Random], CallValue]], ...] = (
    ("string", any_word), ("string", person), ("string", identifier), ("integer", number), ("number", amount),
    ("integer", small_number), ("string", _one_of(*sorted(set(COLOURS.values())))),
)  # fmt: skip


def made_up_skill(rng: Random) -> Skill:
    """A tool that no list contains; its questions name the parameters."""
    verb = rng.choice(_MADE_UP_VERBS) if rng.random() < 0.7 else strange_word(rng)
    noun = any_word(rng)
    names = list(dict.fromkeys(any_word(rng) for _ in range(rng.randint(1, 3))))
    kinds = [rng.choice(_MADE_UP_KINDS) for _ in names]
    # Roles are numbered, since a made-up name need not suit str.format.
    roles = {
        f"r{i}": Role((name,), draw, kind) for i, (name, (kind, draw)) in enumerate(zip(names, kinds, strict=True))
    }
    filled = " and ".join(f"{name} {{r{i}}}" for i, name in enumerate(names))
    questions = (f"{verb.title()} the {noun} with {filled}.", f"Please {verb} the {noun} with {filled}.",
                 f"{verb.title()} {noun}: {filled}", f"I want to {verb} the {noun} with {filled}.")  # fmt: skip
    descriptions = (f"{verb.title()} the {noun}.", f"{verb.title()}s a {noun}.", f"{verb} {noun}", "")
    return Skill(verb, noun, descriptions, roles, questions, "The result", _number_result)


def _name_of(words: str, rng: Random) -> str:
    parts = words.split()
    if rng.random() < 0.75:
        return "_".join(parts)
    return parts[0] + "".join(part.title() for part in parts[1:])


@dataclass(frozen=True, slots=True)
class Drawn:
    """One tool of a skill; `roles` says by which parameter it takes a role. Not every tool takes every role."""

    skill: Skill
    tool: Tool
    roles: Mapping[str, str]


# Names that everyone uses are for training, wherever the hash would put them.
_TRAINED_NAMES = ("calculate", "calculator")


def name_is_held_out(words: str) -> bool:
    return words not in _TRAINED_NAMES and is_held_out(f"function {words}")


def has_held_out_name(skill: Skill) -> bool:
    names = (f"{verb} {noun}".strip() for verb in skill.verbs.split("|") for noun in skill.nouns.split("|"))
    return any(name_is_held_out(name) for name in names)


def draw_tool(skill: Skill, rng: Random, *, held_out: bool | None) -> Drawn:
    """The split looks at the words of the name, however it is written. None draws from both sides of it."""
    while True:
        words = f"{rng.choice(skill.verbs.split('|'))} {rng.choice(skill.nouns.split('|'))}".strip()
        if words and (held_out is None or name_is_held_out(words) is held_out):
            break
    wanted = set(skill.roles)
    if "unit" in wanted and rng.random() < 0.5:
        wanted.remove("unit")
    if {"count", "sides"} <= wanted and rng.random() < 0.3:
        wanted.remove(rng.choice(("count", "sides")))
    while True:
        roles = {role: rng.choice(skill.roles[role].names) for role in skill.roles if role in wanted}
        if len(set(roles.values())) == len(roles):
            break
    description = rng.choice(skill.descriptions)
    if rng.random() < 0.05:
        description = ""
    parameters = {name: _kind(skill.roles[role].kind, rng) for role, name in roles.items()}
    return Drawn(skill, Tool(_name_of(words, rng), description, parameters), roles)


def _kind(kind: ParameterType, rng: Random) -> ParameterType:
    if isinstance(kind, tuple):
        return kind if rng.random() < 0.8 else "string"
    return rng.choice(("integer", "number")) if kind == "number" and rng.random() < 0.3 else kind


@dataclass(frozen=True, slots=True)
class Ask:
    """A question for a drawn tool, the values of its roles, and what comes back."""

    text: str
    values: Mapping[str, CallValue]
    arguments: Mapping[str, CallValue]
    result: str
    answer: str


def _fields_of(question: str, skill: Skill) -> set[str]:
    return {role for role in skill.roles if f"{{{role}}}" in question}


def _draw_value(role: Role, rng: Random, *, held_out: bool, integer: bool) -> CallValue:
    """Texts are split too, where enough of them exist."""
    while True:
        value = role.draw(rng)
        if integer and isinstance(value, float):
            continue
        free = role.draw in (place, person, topic, sentence, any_word, file_name, identifier)
        if not free or is_held_out(f"value {value}") is held_out:
            return value


def fitting(questions: tuple[str, ...], drawn: Drawn) -> tuple[str, ...]:
    """Those of a skill's questions that the drawn tool can answer."""
    return tuple(text for text in questions if _fields_of(text, drawn.skill) <= set(drawn.roles))


def draw_ask(drawn: Drawn, rng: Random, *, held_out: bool, wordings: tuple[str, ...] = ()) -> Ask:
    """Asks in one of `wordings`, or in the skill's own where there are none for the drawn roles."""
    skill, tool = drawn.skill, drawn.tool
    question = rng.choice(fitting(wordings, drawn) or fitting(skill.questions, drawn))
    filled = _fields_of(question, skill)
    values = {
        role: _draw_value(skill.roles[role], rng, held_out=held_out, integer=tool.parameters[name] == "integer")
        for role, name in drawn.roles.items()
        if role in filled
    }
    arguments = {drawn.roles[role]: value for role, value in values.items()}
    result, answer = _outcome(skill, values, rng)
    return Ask(question.format(**values), values, arguments, result, answer)


# Keys that say nothing about their value.
_PLAIN_KEYS = frozenset(("result", "value", "answer", "total", "text", "title", "time"))


def _outcome(skill: Skill, values: Mapping[str, CallValue], rng: Random) -> tuple[str, str]:
    """What the tool returns, and the sentence that says so."""
    if rng.random() < 0.04:
        reason = rng.choice(("not found", "no network", "timeout", any_word(rng)))
        return f"error: {reason}", f"That did not work: {reason}."
    result = skill.result(rng)
    subject = skill.topic.format(**values)
    if isinstance(result, str):
        return result, "Done." if result in DONE else f"{subject} is {result}."
    echoed = {}
    if values and rng.random() < 0.4:
        role = rng.choice(list(values))
        echoed = {rng.choice(skill.roles[role].names): values[role]}
    told = {key: value for key, value in result.items() if key not in echoed} or result
    separators = (",", ":") if rng.random() < 0.1 else (", ", ": ")
    returned = json.dumps(echoed | result, ensure_ascii=False, separators=separators)
    if len(told) == 1 and not _PLAIN_KEYS.isdisjoint(told):
        return returned, f"{subject} is {next(iter(told.values()))}."
    said = " and ".join(f"the {key.replace('_', ' ')} is {value}" for key, value in told.items())
    return returned, f"{subject}: {said}."
