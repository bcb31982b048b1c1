"""The facts that the model learns by heart, as plain tables."""

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Greece": "Athens", "Poland": "Warsaw", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin", "England": "London", "Hungary": "Budapest",
    "Belgium": "Brussels", "Russia": "Moscow", "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Thailand": "Bangkok", "Vietnam": "Hanoi",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Cuba": "Havana", "Brazil": "Brasilia", "Chile": "Santiago",
    "Peru": "Lima", "Argentina": "Buenos Aires", "Australia": "Canberra", "Iceland": "Reykjavik", "Nepal": "Kathmandu",
}  # fmt: skip

COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a strawberry": "red",
    "coal": "black", "a lemon": "yellow", "milk": "white", "a tomato": "red", "a carrot": "orange",
    "a frog": "green", "a crow": "black", "chocolate": "brown", "a flamingo": "pink", "an elephant": "gray",
    "a cherry": "red", "the sun": "yellow", "a leaf": "green", "a pumpkin": "orange", "a swan": "white",
    "a plum": "purple", "a polar bear": "white", "a fire engine": "red", "the sea": "blue", "a pea": "green",
}  # fmt: skip

YOUNG = {
    "cat": "kitten", "dog": "puppy", "cow": "calf", "horse": "foal", "sheep": "lamb", "hen": "chick",
    "pig": "piglet", "duck": "duckling", "goose": "gosling", "bear": "cub", "goat": "kid", "frog": "tadpole",
    "owl": "owlet", "swan": "cygnet", "deer": "fawn", "kangaroo": "joey", "rabbit": "bunny", "butterfly": "caterpillar",
}  # fmt: skip

SOUNDS = {
    "cat": "meow", "dog": "woof", "cow": "moo", "sheep": "baa", "pig": "oink", "duck": "quack", "horse": "neigh",
    "lion": "roar", "bee": "buzz", "snake": "hiss", "owl": "hoot", "frog": "croak", "mouse": "squeak",
    "hen": "cluck", "wolf": "howl", "crow": "caw",
}  # fmt: skip

LEGS = {
    "cat": 4, "dog": 4, "cow": 4, "horse": 4, "sheep": 4, "pig": 4, "lion": 4, "mouse": 4, "rabbit": 4, "bear": 4,
    "hen": 2, "duck": 2, "owl": 2, "crow": 2, "bee": 6, "ant": 6, "spider": 8, "snake": 0, "fish": 0,
}  # fmt: skip

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("left", "right"), ("day", "night"), ("black", "white"),
    ("fast", "slow"), ("happy", "sad"), ("old", "young"), ("open", "closed"), ("in", "out"), ("rich", "poor"),
    ("hard", "soft"), ("wet", "dry"), ("high", "low"), ("long", "short"), ("early", "late"), ("full", "empty"),
    ("strong", "weak"), ("loud", "quiet"), ("light", "dark"), ("true", "false"), ("yes", "no"), ("near", "far"),
    ("clean", "dirty"), ("thick", "thin"), ("first", "last"), ("good", "bad"), ("easy", "difficult"), ("win", "lose"),
)  # fmt: skip

PLURALS = {
    "cat": "cats", "dog": "dogs", "house": "houses", "tree": "trees", "book": "books", "car": "cars",
    "child": "children", "mouse": "mice", "foot": "feet", "tooth": "teeth", "man": "men", "woman": "women",
    "goose": "geese", "box": "boxes", "fox": "foxes", "bus": "buses", "city": "cities", "baby": "babies",
    "leaf": "leaves", "knife": "knives", "wolf": "wolves", "sheep": "sheep", "apple": "apples", "bird": "birds",
    "story": "stories", "key": "keys", "wish": "wishes", "potato": "potatoes", "star": "stars", "person": "people",
}  # fmt: skip

PASTS = {
    "go": "went", "see": "saw", "eat": "ate", "run": "ran", "come": "came", "find": "found", "give": "gave",
    "take": "took", "make": "made", "say": "said", "think": "thought", "sing": "sang", "swim": "swam",
    "write": "wrote", "sleep": "slept", "play": "played", "walk": "walked", "jump": "jumped", "buy": "bought",
    "fly": "flew", "drink": "drank", "build": "built", "help": "helped", "smile": "smiled",
}  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip

NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip

CATEGORIES = {
    "a fruit": ("apple", "banana", "cherry", "lemon", "plum", "strawberry"),
    "an animal": ("cat", "dog", "horse", "lion", "mouse", "rabbit", "sheep", "wolf"),
    "a colour": ("red", "blue", "green", "yellow", "white", "black", "pink"),
    "a tool": ("hammer", "saw", "spade", "rake"),
    "a vegetable": ("carrot", "potato", "pea", "onion"),
    "a piece of furniture": ("table", "chair", "bed", "sofa"),
}  # fmt: skip

WORDS = (
    "apple", "baby", "ball", "banana", "bear", "bed", "bird", "blue", "boat", "book", "box", "bread", "cake", "car",
    "cat", "chair", "cloud", "cow", "cup", "dog", "door", "duck", "egg", "fish", "flower", "fox", "frog", "garden",
    "gold", "grass", "green", "hat", "hen", "hill", "honey", "horse", "house", "key", "king", "kite", "lake", "lamp",
    "leaf", "lemon", "lion", "milk", "moon", "mouse", "nest", "night", "owl", "paper", "pig", "pink", "queen", "rain",
    "red", "river", "road", "rose", "school", "sea", "ship", "shoe", "snow", "star", "stone", "sun", "table", "tea",
    "train", "tree", "village", "water", "white", "wind", "window", "winter", "wolf", "yellow",
)  # fmt: skip

NAMES = (
    "Tom", "Anna", "Ben", "Lily", "Max", "Mia", "Sam", "Zoe", "Leo", "Emma", "Jack", "Ella", "Tim", "Nora", "Paul",
    "Rosa", "Finn", "Clara", "Oscar", "Ruby", "Hugo", "Ida", "Felix", "Alice", "Peter", "Lucy", "Simon", "Julia",
    "Oliver", "Sara", "David", "Maria", "Adam", "Eva", "Robin", "Kim", "Noah", "Olga", "Victor", "Helen", "Bruno",
    "Pip", "Dora", "Milo", "Luna", "Bella", "Toby", "Daisy", "Rex", "Poppy",
)  # fmt: skip
