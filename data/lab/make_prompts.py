"""Write prompts.jsonl: chats of our own, in eight plainly different slices, a tenth of each held out.

Every slice is a set of hand-written templates with hand-written fillings; a fixed seed picks which pairs are used, no two prompts are
equal, and slices are interleaved so that the first lines of the file already hold all of them. Run it to rebuild the file bit for bit:

    python data/lab/make_prompts.py [--out FOLDER]
"""

import argparse
import itertools
import json
import random
from pathlib import Path

PER_SLICE = 135
HELD_OUT_EVERY = 10

CHAT_TROUBLES = """I keep waking up at four in the morning
my neighbour's dog barks all afternoon
I forgot my best friend's birthday
my flatmate never washes the dishes
I have to give a speech at my sister's wedding
I am nervous about my first day at a new job
my phone battery dies before lunch
I cannot decide between two job offers
my teenage son spends all evening playing games
I said something rude to a colleague yesterday
my garden tomatoes are turning brown
I am moving to a city where I know nobody
my bicycle makes a clicking noise when I pedal
I want to stop drinking so much coffee
my grandmother refuses to use a hearing aid
I always run late in the morning
I have an exam in three days and have not started
my cat scratches the new sofa
I would like to read more but I am always tired
my bread never rises properly
I got a parking ticket that seems unfair
my best friend moved to another country
I am bored of cooking the same five dinners
I lost my keys for the third time this month
my manager gives me work at five on a Friday
I feel lonely since I began to work from home
my running shoes give me blisters
I am afraid of flying and have a trip next week
my little brother has broken my headphones
I want to learn the guitar at the age of fifty""".splitlines()
CHAT_ASKS = [
    "Hi! {T}. What would you do?",
    "I need some advice: {t}. Any ideas?",
    "Can we talk? {T}, and I do not know where to start.",
    "{T}. Please give me one small step that I could take today.",
    "Be honest with me. {T}. Is it my own fault?",
    "{T}. How do I explain this to my family without making it sound worse than it is?",
]
CHAT_OPENERS = """What do you like most about rainy days?
Which season do you think is the best one for a long walk?
If you could have dinner with someone from history, who would it be?
Do you prefer tea or coffee, and why?
What makes a good friend?
Tell me something surprising that most people do not know.
What should I watch tonight if I want to laugh?
Can you recommend a hobby that costs almost nothing?
What is the nicest way to say no?
How are you today?
Why do people like old photographs so much?
Is it better to be early or exactly on time?
What would you pack for a weekend by the sea?
What is a good question to ask a stranger on a train?
Could you cheer me up a little?
What do you think about pineapple on pizza?
How can I make a very small room feel larger?
Who are you, and what can you help me with?""".splitlines()

CODE_TASKS = """checks whether a string is a palindrome
returns the n-th Fibonacci number
counts how often each word occurs in a text
reverses a linked list
finds the largest number in a list
removes duplicates from a list but keeps the order
converts a temperature from Celsius to Fahrenheit
merges two sorted lists into one sorted list
computes the factorial of a number
tests whether a year is a leap year
reads a text file and prints its longest line
flattens a list of lists
finds the second smallest value in an array
rotates a square matrix by ninety degrees
checks whether brackets in a string are balanced
computes the greatest common divisor of two integers
sorts a list of people by age and then by name
generates all prime numbers below a limit
counts the vowels in a sentence
parses a date such as 2024-05-17 into day, month and year
computes the average of a list and ignores missing values
searches a sorted array with binary search
groups a list of words by their first letter
converts an integer to a Roman numeral
finds the common elements of two lists
validates an email address in a simple way
computes the running total of a list of numbers
splits a list into chunks of a given size
measures how long another function takes
returns the intersection point of two straight lines""".splitlines()
CODE_ASKS = [
    "Write a Python function that {t}.",
    "Write a JavaScript function that {t}, with a short comment.",
    "Show me Python code that {t}, and explain it line by line.",
    "Give me a small C function that {t}.",
    "Write a unit test in Python for a function that {t}.",
    "How would you write a Rust function that {t}?",
]
CODE_QUESTIONS = """What is the difference between a list and a tuple in Python?
Explain what a SQL JOIN does and give an example with two tables.
Write an HTML page with a heading, a paragraph and a list of three links.
Write a CSS rule that centres a box on the page.
What does `git rebase` do, and when should I avoid it?
Write a bash loop that renames every .txt file in a folder to .md.
Explain recursion to a beginner with a short example in Python.
What is a null pointer, and why is it dangerous?
Write a SQL query that returns the five customers with the highest total orders.
What is the time complexity of quicksort, and why?
Write a JSON document that describes a book with title, author, year and tags.
Fix this Python code: `for i in range(10) print(i)`
Why does `0.1 + 0.2` not equal `0.3` in most languages?
Write a regular expression that matches a phone number such as 555-1234.
Write a Python class for a bank account with deposit and withdraw methods.
What is the difference between a process and a thread?
Write a Dockerfile for a small Python web application.
Explain what an API is, with a simple example of a request and a response.""".splitlines()

LIST_ASKS = [
    "List {n} {t}.",
    "Give me {n} {t}, one per line, with a few words on each.",
    "Make a numbered list of {n} {t}.",
    "I am looking for {n} {t}. Bullet points only, please.",
    "What are {n} {t}? Start with the most important one.",
]
LIST_NUMBERS = ["three", "four", "five", "six", "seven", "eight", "ten"]
LIST_THINGS = """vegetables that grow well in the shade
things to pack for a camping trip
animals that live in the desert
ways to save water at home
questions for a job interview
inventions of the nineteenth century
healthy snacks for children
reasons to learn a second language
games to play on a long train ride
tools that every household should have
musical instruments with strings
famous rivers and the countries they cross
habits of people who sleep well
ingredients of a good vegetable soup
safety rules for a chemistry class
birds that can be seen in a city park
ideas for a cheap birthday present
mistakes that new drivers make
parts of a bicycle
materials used to build houses
words that describe the sea
chemical elements and what they are used for
warning signs of a dishonest email
exercises that need no equipment
planets and one fact about each
spices and the dishes that they suit
books every traveller should read
cheeses from different countries
steps to take before buying a used car
advantages of public transport""".splitlines()

MATHS_ASKS = [
    "A shop sells {a} boxes with {b} pencils each. How many pencils are there in total? Show the steps.",
    "What is {a} × {b} + {c}?",
    "Solve for x: {b}x + {c} = {d}.",
    "A train travels {d} km in {b} hours. What is its average speed?",
    "Anna has {a} apples. She gives {b} to Tom and buys {c} more. How many apples does she have now?",
    "What is {p} % of {d}? Explain how you get the answer.",
    "A rectangle is {a} cm long and {b} cm wide. Find its area and its perimeter.",
    "If {b} workers need {c} days to paint a house, how many days do {e} workers need at the same speed?",
    "The numbers {a}, {c}, {b} and {d} are given. What is their mean?",
    "A jacket costs {d} dollars. Its price falls by {p} %. What does it cost now?",
    "Is {a} a prime number? Explain why or why not.",
    "Write {a}/{d} as a simplified fraction.",
    "How many minutes are there in {b} hours and {c} minutes?",
    "A recipe for {b} people needs {d} grams of flour. How much is needed for {e} people?",
    "Find the next two numbers: {b}, {b2}, {b4}, {b8}, ...",
]
MATHS_QUESTIONS = """Explain the Pythagorean theorem with an example.
What is the derivative of x^3 + 2x, step by step?
Why is it impossible to divide by zero?
What is the probability of rolling two sixes with two dice?
Explain what a logarithm is to someone who knows powers.
How do you convert a fraction to a percentage?
What is the sum of the angles in a triangle, and why?
Factor the expression x^2 - 5x + 6.
What is the difference between the mean and the median?
How do I find the area of a circle with a radius of 7 cm?
Prove that the sum of two even numbers is even.
What is the binary form of 37?
Solve the system x + y = 10 and x - y = 4.
What is a prime number, and is 1 a prime number?
Explain what the integral of a function means, in plain words.""".splitlines()

FACT_ASKS = [
    "Explain {t} in simple words.",
    "Why does it matter to understand {t}?",
    "How would you explain {t} to a ten-year-old?",
    "Describe {t} in one short paragraph.",
    "Tell me three things worth knowing about {t}.",
    "What do many people get wrong about {t}?",
]
FACT_THINGS = """photosynthesis
the water cycle
inflation
the French Revolution
plate tectonics
how vaccines work
the ozone layer
the Silk Road
a solar eclipse
supply and demand
natural selection
the Roman Empire's fall
electric current
the immune system
black holes
the invention of printing
coral reefs and their decline
the greenhouse effect
how a refrigerator works
the Great Wall of China
the human heart
tides
democracy in ancient Athens
fermentation
how aeroplanes stay in the air
antibiotic resistance
the periodic table
the Renaissance
earthquakes
the difference between weather and climate""".splitlines()

WRITING_ASKS = [
    "Write a short story about {t}.",
    "Write a poem of eight lines about {t}.",
    "Write the first paragraph of a novel about {t}.",
    "Write a polite email to a friend about {t}.",
    "Write a short dialogue between two old sailors about {t}.",
    "Write a newspaper article of five sentences about {t}.",
    "Write a diary entry about {t}.",
]
WRITING_THINGS = """a lighthouse keeper who finds a letter
a lost dog that crosses a whole country
the last library on Earth
a storm that lasted for forty days
a clock that runs backwards
a baker who cannot taste anything
the day the river froze
a village that moved to the mountains
an old map with one wrong island
a robot that learns to paint
a train that never stops
two brothers and a borrowed boat
a teacher's last day at school
a garden on the roof of a factory
the first snow of the year
a queen who wanted to be a carpenter
a violin found in an attic
a market at midnight
a whale that sings too low to be heard
a letter that arrives thirty years late
the boy who collected shadows
a bridge between two rival towns
a fox and a snowman
a ship without a captain
a summer without rain
the smallest house in the street
a cook in a castle kitchen
an astronaut who misses the sea
a wolf that was afraid of the dark
a city under the ice""".splitlines()

FRENCH_ASKS = [
    "Explique {t} en quelques phrases simples.",
    "Donne-moi trois conseils sur {t}.",
    "Écris un court paragraphe sur {t}.",
    "Que faut-il savoir sur {t} ?",
    "Écris un petit dialogue entre deux amis sur {t}.",
    "Fais une liste de cinq mots utiles sur le thème suivant : {t}. Ajoute une phrase pour chacun.",
]
FRENCH_THINGS = """la cuisine française
les vacances à la mer
le métro de Paris
la Révolution française
le changement climatique
les animaux de la ferme
la musique classique
le petit déjeuner
les fêtes de fin d'année
l'école primaire
le vélo en ville
la lecture
les champignons de la forêt
le sommeil
le travail à distance
les marchés du dimanche
la météo
le jardin au printemps
l'histoire du pain
les voyages en train
la santé des dents
le football
les étoiles et les planètes
le fromage
l'amitié
les langues étrangères
la pluie
les musées
l'argent de poche
le chocolat""".splitlines()

SPANISH_ASKS = [
    "Explica {t} con palabras sencillas.",
    "Dame tres consejos sobre {t}.",
    "Escribe un párrafo corto sobre {t}.",
    "¿Qué es lo más importante que debo saber sobre {t}?",
    "Escribe una conversación breve entre dos vecinos sobre {t}.",
    "Haz una lista de cinco ideas sobre {t}.",
]
SPANISH_THINGS = """la comida mexicana
los viajes en autobús
el agua potable
la historia de América
las plantas de interior
el fútbol
la siesta
los ríos de España
el aprendizaje de idiomas
las fiestas del pueblo
el cuidado de un perro
la energía solar
la música tradicional
los volcanes
la vida en el campo
el ahorro de dinero
los libros para niños
la ciudad de Buenos Aires
el café de la mañana
las mariposas
el trabajo en equipo
los mercados
la lluvia en el desierto
la receta del arroz
el teatro
los trenes antiguos
la amistad
el sueño
los océanos
la educación""".splitlines()

# Earlier turns of the multi-turn chats: what was asked, what was answered, and what may be asked next.
EARLIER_TURNS = {
    "chat": [
        ("I have two free days next week. What should I do?", "You could visit a nearby town, or finally repair that shelf."),
        ("I burnt the dinner again.", "That happens to everyone. A timer and a lower heat help a lot."),
        ("My friend wants to borrow money.", "Lend only what you can afford to lose, and agree on a date."),
    ],
    "code": [
        ("How do I open a file in Python?", "Use `with open('data.txt') as f:` and read it inside the block."),
        ("What does `x = [i * i for i in range(5)]` do?", "It builds the list [0, 1, 4, 9, 16] with a list comprehension."),
        ("How do I install a Python package?", "Run `pip install name` in your terminal."),
    ],
    "facts": [
        ("What is a volcano?", "A volcano is an opening in the Earth's crust through which molten rock, ash and gas escape."),
        ("Who was Marie Curie?", "She was a physicist and chemist who studied radioactivity and won two Nobel Prizes."),
        ("What is a glacier?", "A glacier is a large body of ice that moves slowly under its own weight."),
    ],
    "french": [
        ("Bonjour ! Peux-tu m'aider à apprendre le français ?", "Bien sûr ! Commençons par les salutations : bonjour, bonsoir, au revoir."),
        ("Quelle est la capitale de l'Italie ?", "La capitale de l'Italie est Rome."),
        ("J'ai froid.", "Mets un pull et bois quelque chose de chaud."),
    ],
}
FOLLOW_UPS = {
    "chat": [
        "That does not help me much. Anything else?",
        "Thanks! And what if it rains?",
        "Why do you say that?",
        "Can you make it shorter?",
    ],
    "code": [
        "And how do I do the same in JavaScript?",
        "Can you show a complete example?",
        "What happens if there is an error?",
        "Explain it again, please.",
    ],
    "facts": ["Why is that important?", "Can you give me an example?", "Tell me more about it.", "How do we know this?"],
    "french": ["Merci. Peux-tu donner un exemple ?", "Et en anglais ?", "Pourquoi ?", "Dis-m'en plus, s'il te plaît."],
}
SYSTEMS = [
    "You are a patient teacher.",
    "You answer in as few words as possible.",
    "You are an assistant in a hardware shop.",
    "You are a cheerful radio host.",
]


def fill(asks: list[str], things: list[str]) -> list[str]:
    """Every template with every filling; {T} is the filling with a capital letter."""
    return [ask.format(t=thing, T=thing[0].upper() + thing[1:]) for ask, thing in itertools.product(asks, things)]


def sums(rng: random.Random, count: int) -> list[str]:
    """Word problems with numbers of a size that a person would choose."""
    problems = []
    for ask in itertools.islice(itertools.cycle(MATHS_ASKS), count):
        a, b, c, e = rng.randint(11, 60), rng.randint(2, 9), rng.randint(10, 40), rng.randint(10, 15)
        d = c + b * rng.randint(8, 40)
        problems.append(ask.format(a=a, b=b, c=c, d=d, e=e, p=rng.choice([5, 10, 15, 20, 25, 40]), b2=2 * b, b4=4 * b, b8=8 * b))
    return problems


def slices(rng: random.Random) -> dict[str, list[list[dict]]]:
    """The chats of each slice: single questions, then a few with a system line, then those with earlier turns."""
    lists = [ask.format(n=rng.choice(LIST_NUMBERS), t=thing) for ask, thing in itertools.product(LIST_ASKS, LIST_THINGS)]
    questions = {
        "chat": (CHAT_OPENERS, fill(CHAT_ASKS, CHAT_TROUBLES)),
        "code": (CODE_QUESTIONS, fill(CODE_ASKS, CODE_TASKS)),
        "lists": ([], lists),
        "maths": (MATHS_QUESTIONS, sums(rng, 2 * PER_SLICE)),
        "facts": ([], fill(FACT_ASKS, FACT_THINGS)),
        "writing": ([], fill(WRITING_ASKS, WRITING_THINGS)),
        "french": ([], fill(FRENCH_ASKS, FRENCH_THINGS)),
        "spanish": ([], fill(SPANISH_ASKS, SPANISH_THINGS)),
    }
    chats = {}
    for name, (fixed, composed) in questions.items():
        composed = list(dict.fromkeys(composed))
        earlier = [
            [user(asked), {"role": "assistant", "content": answered}, user(follow)]
            for (asked, answered), follow in itertools.product(EARLIER_TURNS.get(name, []), FOLLOW_UPS.get(name, []))
        ]
        singles = fixed + rng.sample(composed, PER_SLICE - len(fixed) - len(earlier))
        with_system = [[{"role": "system", "content": rng.choice(SYSTEMS)}, user(text)] for text in singles[-6:]]
        chats[name] = [[user(text)] for text in singles[:-6]] + with_system + earlier
        rng.shuffle(chats[name])
    return chats


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where the file goes")
    out = parser.parse_args().out
    chats = slices(random.Random(20240517))
    lines = []
    for i in range(PER_SLICE):
        split = "heldout" if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else "train"
        lines += [{"id": f"{name}-{i:03d}", "slice": name, "split": split, "messages": chats[name][i]} for name in chats]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (out / "prompts.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
