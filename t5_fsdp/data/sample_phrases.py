"""The words of the bundled sample: topics, their steps, and the phrases that join them.

How to read an entry:

* `line` is the bold line of a step; it goes into the summary.
* `advice` says the same thing in other words; one of them goes into the document. Each is an
  imperative without a negation, so that "you should" or "it is best to" can stand before it.
* `reasons` are whole clauses that fit "..., so <advice>" and "because ...".
* `{name}` is filled from the topic's slots, with one value for the whole article. In a value
  "15 minutes|a quarter of an hour" the left side is for the summary, the right side for the
  document; a value without a bar is the same in both.

All sentences were written for this repository. The vocabulary is small on purpose: a tiny model
has to learn it from nothing in a minute or two.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """One thing to do: the bold line, other ways to say it, and why one should do it."""

    line: str
    advice: tuple[str, ...]
    reasons: tuple[str, ...]
    required: bool = False
    """True: every article of the topic has this step; it would make no sense without."""


@dataclass(frozen=True)
class Topic:
    """One kind of article: its titles, its steps in order, and what may fill the slots."""

    name: str
    titles: tuple[str, ...]
    title_endings: tuple[tuple[str, ...], tuple[str, ...]]
    subjects: tuple[str, ...]
    steps: tuple[Step, ...]
    remarks: tuple[str, ...]
    slots: dict[str, tuple[str, ...]] = field(default_factory=dict)


# Values that several topics share: what a model learns in one of them helps it in the others.
SHORT_TIMES = (
    "5 minutes|five minutes",
    "10 minutes|ten minutes",
    "15 minutes|a quarter of an hour",
)
MIDDLE_TIMES = (
    "15 minutes|a quarter of an hour",
    "20 minutes|twenty minutes",
    "30 minutes|half an hour",
)
LONG_TIMES = ("1 hour|sixty minutes", "2 hours|two hours", "3 hours|three hours")
HOW_OFTEN = (
    "every morning|at the start of each day",
    "every evening|at the end of each day",
    "every week|once in seven days",
    "twice a week|on two days of the week",
)
CUPS = ("2 cups|two cups", "3 cups|three cups", "4 cups|four cups")
CLOTHS = (
    "a dry cloth|a cloth that is dry",
    "a damp cloth|a cloth that is a little wet",
    "an old towel|a towel you no longer need",
)
BRUSHES = (
    "a soft brush|a brush with soft hair",
    "a stiff brush|a brush with stiff hair",
    "an old toothbrush|a toothbrush you no longer need",
)
CLEANERS = ("vinegar", "baking soda", "dish soap", "lemon juice")
TAP_WATER = ("cold water|water from the cold tap", "warm water|water from the warm tap")
FATS = ("butter", "olive oil", "coconut oil")

# How a paragraph is put together: each tuple is one or two sentences.
FRAMES_WITH_REASON: tuple[tuple[str, ...], ...] = (
    ("{reason}, so {advice}",),
    ("because {reason}, {advice}",),
    ("since {reason}, it is best to {advice}",),
    ("{reason}", "that is why you should {advice}"),
    ("{reason}", "{lead}, {advice}"),
    ("{advice}, because {reason}",),
    ("{lead}, {advice}", "as you may know, {reason}"),
)
FRAMES_WITHOUT_REASON: tuple[tuple[str, ...], ...] = (
    ("{lead}, {advice}",),
    ("it is best to {advice}",),
    ("you should {advice}",),
    ("even if you are in a hurry, {advice}",),
    ("if you want to do it well, {advice}",),
    ("{advice}",),
)
FIRST_LEADS = ("to begin", "before anything else", "at the start")
MIDDLE_LEADS = ("after that", "next", "when you are ready", "then")
LAST_LEADS = ("in the end", "last of all", "when all of that is done")

# Sentences that say nothing about the steps: a summary has to leave them out.
REMARKS = (
    "this takes only a moment",
    "there is no need to rush",
    "many people forget about this",
    "you will be glad you did",
    "it gets easier each time",
    "ask someone for help if you need it",
    "a little time each day goes a long way",
    "it looks like more work than it is",
    "you may need to try more than once",
    "most people learn this the hard way",
    "small mistakes do not matter much",
    "some music makes the work more fun",
)

_RICE = Topic(
    name="rice",
    titles=("Cook", "Make", "Prepare"),
    title_endings=(
        (
            "for one person",
            "for two people",
            "for four people",
            "for a large family",
            "for hungry children",
            "for guests",
        ),
        (
            "on a gas stove",
            "on a camping stove",
            "in a small kitchen",
            "in a heavy pot",
            "on a busy evening",
            "on a small budget",
            "without much work",
        ),
    ),
    subjects=("brown rice", "white rice", "red rice", "wild rice", "barley"),
    slots={
        "soak": MIDDLE_TIMES,
        "fat": FATS,
        "spice": (
            "some salt|a pinch of salt",
            "some garlic|a piece of garlic",
            "some ginger|a piece of ginger",
        ),
        "cook": ("20 minutes|twenty minutes", "30 minutes|half an hour"),
        "rest": ("5 minutes|five minutes", "10 minutes|ten minutes"),
    },
    steps=(
        Step(
            "Rinse the {subject} until the water is clear.",
            (
                "let cold water run over the {subject} until it is clear",
                "wash the {subject} under the cold tap until the water is clear",
            ),
            ("dust makes the grains stick together", "the grains are never really clean"),
        ),
        Step(
            "Soak the grains in water for {soak}.",
            (
                "leave the grains in a bowl of water for {soak}",
                "cover the grains with water and let them stand for {soak}",
            ),
            ("hard grains need time to get soft", "wet grains cook in less time than dry ones"),
        ),
        Step(
            "Toast the dry grains in hot {fat}.",
            (
                "stir the dry grains in hot {fat} until they smell of nuts",
                "heat some {fat} and let the dry grains turn brown in it",
            ),
            ("a little color makes all the difference", "hot fat brings out the taste"),
        ),
        Step(
            "Add {spice} to the grains in the pot.",
            (
                "drop {spice} into the pot while it is still cold",
                "put {spice} in the pot together with the grains",
            ),
            ("plain grains have very little taste", "a strong taste needs time to come out"),
        ),
        Step(
            "Cover the pot and simmer for {cook}.",
            (
                "put the lid on and let the pot bubble over low heat for {cook}",
                "turn the heat down, close the lid and wait {cook}",
            ),
            ("steam gets out of an open pot", "high heat burns the grains at the bottom"),
            required=True,
        ),
        Step(
            "Let the closed pot rest for {rest}.",
            (
                "take the pot off the stove and leave it closed for {rest}",
                "turn off the stove and give the pot {rest} of rest",
            ),
            (
                "the last of the water still has to go somewhere",
                "the grains at the top are still a little hard",
            ),
        ),
        Step(
            "Fluff the {subject} with a fork.",
            (
                "take a fork and stir the {subject} to let the steam out",
                "pull a fork through the {subject} until it is light and loose",
            ),
            ("a spoon is too heavy for soft grains", "the grains at the bottom stick together"),
        ),
    ),
    remarks=(
        "what is left is good in a salad the next day",
        "each stove is a little different",
        "your kitchen will smell wonderful",
    ),
)

_SOUP = Topic(
    name="soup",
    titles=("Make soup with", "Cook soup with", "Make a simple soup from"),
    title_endings=(
        (
            "for one person",
            "for two people",
            "for four people",
            "for a large family",
            "for a sick friend",
            "for guests",
        ),
        (
            "on a cold day",
            "on a busy evening",
            "in a small kitchen",
            "on a small budget",
            "in one pot",
            "on a camping stove",
        ),
    ),
    subjects=("carrots", "potatoes", "leeks", "tomatoes", "mushrooms", "peppers"),
    slots={
        "cut": ("small cubes", "thin slices", "large pieces"),
        "fat": FATS,
        "cups": CUPS,
        "cook": MIDDLE_TIMES,
        "finish": ("cream", "yogurt", "lemon juice", "cheese"),
    },
    steps=(
        Step(
            "Wash the soil off the {subject}.",
            (
                "hold the {subject} under the tap and rub the soil off",
                "clean the {subject} in a big bowl of water until no soil is left",
            ),
            ("nobody likes soil in a soup", "even clean food has been in many hands"),
        ),
        Step(
            "Cut the {subject} into {cut} with a knife.",
            (
                "take a sharp knife and turn the {subject} into {cut}",
                "use a knife and a board to make {cut} out of the {subject}",
            ),
            ("small pieces cook in less time", "big ones take too long to cook"),
        ),
        Step(
            "Fry an onion in hot {fat} until it is brown.",
            (
                "let an onion turn brown in a little hot {fat}",
                "heat some {fat} and stir an onion in it until it is brown",
            ),
            ("a good soup needs a good start", "a raw onion is too strong"),
        ),
        Step(
            "Add {cups} of hot stock to the pot.",
            (
                "fill up the pot with {cups} of hot stock",
                "cover the food in the pot with stock, about {cups} in all",
            ),
            ("plain water has very little taste", "a thick soup burns at the bottom"),
        ),
        Step(
            "Simmer the soup for {cook} over low heat.",
            (
                "let the soup bubble over low heat for {cook}",
                "turn the heat down low and give the soup {cook} to get ready",
            ),
            ("the taste needs time to come out", "hard pieces need time to get soft"),
            required=True,
        ),
        Step(
            "Blend the soup until it has no lumps.",
            (
                "use a blender on the soup until no lumps are left",
                "run the blender until there are no more lumps in the soup",
            ),
            ("children do not like lumps", "a fine soup is light and easy to eat"),
        ),
        Step(
            "Stir some {finish} into the soup at the end.",
            (
                "take the pot off the stove and mix some {finish} into the soup",
                "add a spoon of {finish} at the very end and mix well",
            ),
            ("the soup may taste a little plain", "a fresh taste goes away with heat"),
        ),
    ),
    remarks=(
        "a big pot is enough for two days",
        "grandmothers have always done it this way",
        "your kitchen will smell wonderful",
    ),
)

_BREAD = Topic(
    name="bread",
    titles=("Bake", "Make", "Bake your own"),
    title_endings=(
        (
            "for one person",
            "for two people",
            "for a large family",
            "for guests",
            "for a school party",
            "for breakfast",
        ),
        (
            "in a small oven",
            "in a gas oven",
            "on a rainy day",
            "on a small budget",
            "without a machine",
            "without much work",
        ),
    ),
    subjects=(
        "white bread",
        "brown bread",
        "potato bread",
        "olive bread",
        "nut bread",
        "milk bread",
    ),
    slots={
        "liquid": ("water", "milk"),
        "extra": ("sugar", "honey", "olive oil", "butter"),
        "knead": SHORT_TIMES,
        "rise": LONG_TIMES,
        "shape": ("a round loaf", "a long loaf", "small rolls"),
        "bake": ("20 minutes|twenty minutes", "30 minutes|half an hour", "1 hour|sixty minutes"),
    },
    steps=(
        Step(
            "Mix the yeast with a cup of warm {liquid}.",
            (
                "stir the yeast into a cup of {liquid} that is warm",
                "let the yeast wake up in a cup of warm {liquid}",
            ),
            ("dry yeast has to wake up first", "cold yeast does no work"),
        ),
        Step(
            "Add {extra} to the flour in a large bowl.",
            (
                "put the flour in a large bowl and pour {extra} over it",
                "mix a big spoon of {extra} with the flour in a bowl",
            ),
            ("plain flour has very little taste", "plain bread gets hard in a day"),
        ),
        Step(
            "Knead the dough with your hands for {knead}.",
            (
                "press and roll the dough with your hands for {knead}",
                "push the dough away with your hands and pull it back for {knead}",
            ),
            ("flour and water need time to come together", "lumps do not go away alone"),
            required=True,
        ),
        Step(
            "Let the dough rise for {rise} in a warm place.",
            (
                "leave the dough in a warm place for {rise} until it is twice as big",
                "put the dough in a warm place under a towel and wait {rise}",
            ),
            ("yeast is slow", "heavy dough makes heavy bread"),
        ),
        Step(
            "Shape the dough into {shape} with your hands.",
            (
                "form {shape} from the dough on a clean table",
                "use your hands to make {shape} out of the dough",
            ),
            ("a good form helps it to get brown on all sides", "it is a pleasure to the eye"),
        ),
        Step(
            "Bake the {subject} in the oven for {bake}.",
            (
                "leave the {subject} in the hot oven for {bake}",
                "put the {subject} in the oven and take it out after {bake}",
            ),
            ("the inside takes longer than the outside", "a pale loaf is still raw inside"),
            required=True,
        ),
        Step(
            "Cool the hot bread on a rack.",
            (
                "set the hot bread on a rack until it is no longer warm",
                "put the bread on a rack where air can get to all sides",
            ),
            ("steam makes the bottom wet", "hot bread is hard to cut"),
        ),
    ),
    remarks=(
        "each oven is a little different",
        "even the best burn a loaf now and then",
        "your kitchen will smell wonderful",
    ),
)

_PLANTS = Topic(
    name="plants",
    titles=("Grow", "Plant", "Start to grow"),
    title_endings=(
        (
            "on a balcony",
            "by a window",
            "in a small garden",
            "on a roof",
            "behind the house",
            "at school",
        ),
        (
            "for the first time",
            "in a dry summer",
            "in a cold spring",
            "with children",
            "on a small budget",
            "without much work",
        ),
    ),
    subjects=("tomatoes", "peppers", "basil", "mint", "beans", "lettuce"),
    slots={
        "pot": ("clay pot", "wide pot", "deep pot"),
        "soil": ("light soil", "rich soil", "fresh soil"),
        "depth": ("1 inch|one inch", "2 inches|two inches", "3 inches|three inches"),
        "light": ("full sun|a place with sun all day", "shade|a place with no sun all day"),
        "often": HOW_OFTEN,
        "pest": ("snails", "bugs", "worms"),
        "weeks": ("6 weeks|six weeks", "8 weeks|eight weeks", "10 weeks|ten weeks"),
    },
    steps=(
        Step(
            "Choose a {pot} with holes at the bottom.",
            (
                "get a {pot} that has holes to let the water out",
                "look for a {pot} that has a few holes at the bottom",
            ),
            ("roots do not like to stand in water", "rain has to go somewhere"),
        ),
        Step(
            "Fill most of the pot with {soil}.",
            (
                "put {soil} in the pot and leave a little room at the top",
                "pour {soil} in the pot until it is almost full",
            ),
            ("roots need air as well as water", "old soil has no food left in it"),
        ),
        Step(
            "Plant each of the seeds {depth} deep.",
            (
                "push each of the seeds {depth} down with your finger",
                "make holes of {depth} and drop the seeds in them",
            ),
            ("birds eat what they can see", "seeds wake up in the dark"),
            required=True,
        ),
        Step(
            "Let the pot stand in {light}.",
            ("find {light} where the pot can stand", "carry the pot to {light} and leave it there"),
            ("leaves need light to stay green", "some plants need more light than others"),
        ),
        Step(
            "Water the {subject} with a can {often}.",
            (
                "use a can to give the {subject} a drink {often}",
                "take a can and let the {subject} drink {often}",
            ),
            ("a pot gets dry very fast", "thirsty leaves hang down and turn brown"),
            required=True,
        ),
        Step(
            "Pick all the {pest} off the leaves.",
            (
                "look under the leaves and take away all the {pest} you find",
                "get rid of all {pest} on the leaves with your fingers",
            ),
            ("one night is enough to lose all leaves", "small animals can be very hungry"),
        ),
        Step(
            "Wait {weeks} to harvest the {subject}.",
            (
                "wait {weeks} before you cut and eat the {subject}",
                "let {weeks} go by and then cut the first {subject}",
            ),
            ("small plants have very little taste", "good things take time"),
        ),
    ),
    remarks=(
        "some years are better than others",
        "your neighbors may want some too",
        "birds will come to look at them",
    ),
)

_BIKE = Topic(
    name="bike",
    titles=("Take care of your", "Clean and check your", "Look after your"),
    title_endings=(
        (
            "at home",
            "in a small yard",
            "on the road",
            "without a shop",
            "with your child",
            "with simple tools",
        ),
        (
            "in winter",
            "in spring",
            "after a long ride",
            "before a long ride",
            "after rain",
            "on a small budget",
        ),
    ),
    subjects=("road bike", "mountain bike", "city bike", "old bike", "school bike"),
    slots={
        "brush": BRUSHES,
        "cloth": CLOTHS,
        "oil": ("light oil", "thick oil", "bike oil"),
        "damage": ("cracks", "glass", "nails"),
        "often": HOW_OFTEN,
        "tool": ("a wrench", "a hex key"),
    },
    steps=(
        Step(
            "Turn the {subject} upside down.",
            (
                "set the {subject} on its seat with the wheels in the air",
                "stand the {subject} on its head so that the wheels are free",
            ),
            ("wheels turn best in the air", "it is hard to work on your knees"),
        ),
        Step(
            "Clean the dirt off the chain with {brush}.",
            (
                "rub the dirt off the chain with {brush}",
                "take {brush} and go over the chain until the dirt is off",
            ),
            ("dirt makes a chain slow and loud", "sand eats into the metal"),
            required=True,
        ),
        Step(
            "Wipe the frame with {cloth} until it shines.",
            (
                "go over the frame from front to back with {cloth}",
                "take {cloth} and rub the frame until it shines",
            ),
            ("salt and mud eat into the paint", "cracks hide under the mud"),
        ),
        Step(
            "Put a few drops of {oil} on the chain.",
            (
                "let a few drops of {oil} fall on the chain while it turns",
                "give the chain some {oil}, one drop at a time",
            ),
            ("dry metal makes a lot of noise", "rust comes with the first rain"),
        ),
        Step(
            "Check all sides of the tires for {damage}.",
            (
                "look at the tires from all sides to find {damage}",
                "use your fingers to find {damage} on all sides of the tires",
            ),
            ("a small thing can stop a long ride", "nobody likes to walk home"),
        ),
        Step(
            "Pump more air in the tires {often}.",
            ("put more air in the tires {often}", "take the pump and make the tires hard {often}"),
            ("some air gets out every day", "soft tires make you slow"),
        ),
        Step(
            "Tighten all of the loose bolts with {tool}.",
            (
                "turn all loose bolts with {tool} until they are tight",
                "take {tool} and make sure that no bolts are loose",
            ),
            ("a bad road shakes things loose", "loose bolts make a lot of noise"),
        ),
    ),
    remarks=(
        "a shop asks a lot of money for the same work",
        "old clothes are best for this kind of work",
        "a clean bike is a pleasure to the eye",
    ),
)

_CLEANING = Topic(
    name="cleaning",
    titles=("Clean your", "Wash your", "Get the dirt off your"),
    title_endings=(
        (
            "with simple things",
            "with what you have at home",
            "without strong smells",
            "without hard work",
            "with your children",
            "on a small budget",
        ),
        (
            "before guests come",
            "after a party",
            "on a rainy day",
            "in spring",
            "in a rush",
            "when you move out",
        ),
    ),
    subjects=("oven", "sink", "bathtub", "fridge", "shower", "stove"),
    slots={
        "brush": BRUSHES,
        "cleaner": CLEANERS,
        "wait": MIDDLE_TIMES,
        "sponge": (
            "a rough sponge|a sponge with a rough side",
            "a soft sponge|a sponge with a soft side",
        ),
        "water": TAP_WATER,
        "cloth": CLOTHS,
        "often": HOW_OFTEN,
    },
    steps=(
        Step(
            "Remove all of the loose dirt with {brush}.",
            (
                "take {brush} and get rid of the dirt that is loose",
                "use {brush} on the dirt that comes off by itself",
            ),
            ("dry dirt is easy to move", "water turns dust into mud"),
        ),
        Step(
            "Mix a cup of {cleaner} with the water.",
            (
                "pour a cup of {cleaner} in a big bowl of water",
                "stir a cup of {cleaner} into the water",
            ),
            ("water alone is not enough", "fat and water do not like each other"),
        ),
        Step(
            "Spray the {subject} and let it rest for {wait}.",
            (
                "wet all of the {subject} from a bottle and leave it for {wait}",
                "use a spray bottle on the {subject} and let it be for {wait}",
            ),
            ("old dirt needs time to get soft", "time does half of the work"),
        ),
        Step(
            "Scrub the {subject} in circles with {sponge}.",
            (
                "rub the {subject} in small circles with {sponge}",
                "take {sponge} and go over the {subject} in circles from top to bottom",
            ),
            ("some spots are hard to get off", "fat sticks to everything"),
            required=True,
        ),
        Step(
            "Rinse the soap off the {subject} with {water}.",
            (
                "wash away all the soap that is left in the {subject} with {water}",
                "let {water} run over the {subject} until the soap is off",
            ),
            ("soap leaves white spots", "old soap begins to smell"),
        ),
        Step(
            "Dry the {subject} with {cloth} until it shines.",
            (
                "rub the {subject} with {cloth} until it is free of drops",
                "take {cloth} and go over the {subject} until it shines",
            ),
            ("drops leave spots", "rust comes with the first drops"),
        ),
        Step(
            "Come back to clean the {subject} {often}.",
            (
                "do the same to the {subject} {often}",
                "do it again and give the {subject} a good wash {often}",
            ),
            ("dirt never stays away for long", "fresh dirt is easy to get off"),
        ),
    ),
    remarks=(
        "open a window if you do not like the smell",
        "a clean home is a pleasure to the eye",
        "guests will look at it first",
    ),
)

_STUDY = Topic(
    name="study",
    titles=("Study for your next test in", "Prepare for an exam in", "Learn more in"),
    title_endings=(
        (
            "at school",
            "at home",
            "on your own",
            "with friends",
            "with a baby in the house",
            "in a loud home",
        ),
        (
            "in a short time",
            "in one week",
            "after a bad grade",
            "for the first time",
            "without fear",
            "on a busy day",
        ),
    ),
    subjects=("history", "math", "music", "English", "art", "science"),
    slots={
        "span": ("week|seven days", "two weeks|fourteen days", "month|thirty days"),
        "place": ("the library", "a quiet room", "the garden"),
        "device": ("phone", "computer", "radio"),
        "times": ("twice|two times", "aloud|in a loud voice", "slowly|without any rush"),
        "session": ("20 minutes|twenty minutes", "30 minutes|half an hour", "1 hour|sixty minutes"),
        "partner": ("a friend", "your sister", "your teacher"),
        "hours": ("7 hours|seven hours", "8 hours|eight hours", "9 hours|nine hours"),
    },
    steps=(
        Step(
            "Plan what you will learn in the next {span}.",
            (
                "write down what you will do in the next {span}",
                "decide what you want to do in the next {span}",
            ),
            ("it is easy to forget the time", "big things are easier in small pieces"),
        ),
        Step(
            "Study your books in {place}.",
            (
                "take your books and sit down in {place}",
                "go to {place} with your books when you want to learn",
            ),
            ("it is hard to think in a loud home", "it is easy to learn without noise"),
        ),
        Step(
            "Turn off the {device} while you learn.",
            (
                "keep your {device} silent until you are done",
                "make sure that the {device} is off while you learn",
            ),
            ("it is hard to think with noise", "news can wait"),
        ),
        Step(
            "Read all of your {subject} notes {times}.",
            (
                "go through all your notes for {subject} {times}",
                "open your {subject} book and go over the notes {times}",
            ),
            ("nobody can remember it all at once", "the most important things are in there"),
            required=True,
        ),
        Step(
            "Take a break from work after {session}.",
            (
                "stand up and rest after you work for {session}",
                "work for {session} and then go for a walk",
            ),
            ("a tired head learns nothing", "your eyes need rest too"),
        ),
        Step(
            "Practice some old questions with {partner}.",
            (
                "ask {partner} to sit down with you and go over old questions",
                "go over some questions of last year together with {partner}",
            ),
            ("it is easier to learn with others", "you only know what you can tell others"),
        ),
        Step(
            "Sleep for {hours} before the test.",
            (
                "go to bed early and get {hours} of rest on the last night",
                "be in bed for {hours} on the night before the big day",
            ),
            ("your head goes on to learn in bed", "tired people make mistakes"),
        ),
    ),
    remarks=(
        "even the best have bad days",
        "a cup of milk makes it more fun",
        "fear is normal and goes away",
    ),
)

_PETS = Topic(
    name="pets",
    titles=("Take care of your", "Look after your", "Be a good friend to your"),
    title_endings=(
        (
            "in a small home",
            "in a house with children",
            "in the city",
            "on a small budget",
            "on your own",
            "with your children",
        ),
        (
            "for the first time",
            "in winter",
            "in a hot summer",
            "in its first week",
            "when you work all day",
            "on rainy days",
        ),
    ),
    subjects=("rabbit", "cat", "dog", "puppy", "kitten"),
    slots={
        "corner": ("a quiet corner", "a warm room", "the kitchen"),
        "often": ("every morning|at the start of each day", "every evening|at the end of each day"),
        "bowl": ("a heavy bowl", "a clay bowl", "a metal bowl"),
        "brush": BRUSHES,
        "play": ("10 minutes|ten minutes", "20 minutes|twenty minutes", "30 minutes|half an hour"),
        "clippers": ("small scissors", "a nail file"),
        "season": ("every spring|when winter is over", "every fall|when summer is over"),
    },
    steps=(
        Step(
            "Make a soft place to sleep in {corner}.",
            (
                "find {corner} and put a few towels there to sleep on",
                "put some old clothes in {corner} as a place to sleep",
            ),
            ("a new home brings fear", "the floor is cold and hard"),
        ),
        Step(
            "Give food to the {subject} {often}.",
            (
                "bring the {subject} a bowl of food {often}",
                "fill the bowl of the {subject} with food {often}",
            ),
            ("animals like to know when food will come", "a hungry animal is loud"),
            required=True,
        ),
        Step(
            "Offer clean water to drink in {bowl}.",
            ("pour clean water to drink in {bowl}", "keep {bowl} full of water that is clean"),
            ("a warm room makes animals thirsty", "animals drink more than you think"),
        ),
        Step(
            "Brush the hair on its back with {brush}.",
            (
                "go through the hair on its back with {brush}",
                "take {brush} and get the loose hair off its back",
            ),
            ("loose hair gets on your clothes", "long hair sticks together"),
        ),
        Step(
            "Play games with the {subject} for {play}.",
            (
                "roll a ball to the {subject} and have fun for {play}",
                "give the {subject} {play} of games and fun",
            ),
            ("animals get fat when they only eat", "nobody likes to be alone all day"),
        ),
        Step(
            "Trim the tips of its claws with {clippers}.",
            (
                "make the tips of its claws smaller with {clippers}",
                "take {clippers} and cut the tips of its claws",
            ),
            ("sharp claws leave marks on the floor", "long claws break and hurt"),
        ),
        Step(
            "Take the {subject} to the vet {season}.",
            (
                "let the vet have a look at the {subject} {season}",
                "bring the {subject} to the vet {season}",
            ),
            ("animals hide it when they hurt", "it is better to find things early"),
        ),
    ),
    remarks=(
        "some animals need more time than others",
        "animals know when you are tired",
        "a friend like this stays for many years",
    ),
)

_PAINTING = Topic(
    name="painting",
    titles=("Paint your", "Give new color to your", "Put fresh paint on your"),
    title_endings=(
        (
            "on your own",
            "with a friend",
            "with your children",
            "with simple tools",
            "without much mess",
            "without hard work",
        ),
        (
            "in one day",
            "in summer",
            "on a small budget",
            "for the first time",
            "before you move in",
            "in a small home",
        ),
    ),
    subjects=(
        "wooden door",
        "garden fence",
        "old chair",
        "kitchen wall",
        "wooden table",
        "bedroom wall",
    ),
    slots={
        "sheet": ("old sheets", "old paper", "old towels"),
        "cleaner": CLEANERS,
        "filler": ("putty", "plaster", "wood paste"),
        "paper": ("fine sandpaper", "rough sandpaper"),
        "brush": ("a wide brush", "a small brush", "a roller"),
        "dry": LONG_TIMES,
        "color": ("white", "green", "blue", "red", "brown"),
    },
    steps=(
        Step(
            "Cover the floor around you with {sheet}.",
            ("put {sheet} on the floor all around you", "keep the floor clean with a few {sheet}"),
            ("drops fall where you want no paint", "it is hard to get spots off the floor"),
        ),
        Step(
            "Wash the dirt off the {subject} with {cleaner}.",
            (
                "clean the {subject} with water and {cleaner} until the dirt is off",
                "take some {cleaner} and get the dirt off the {subject}",
            ),
            ("paint does not stick to dirt", "fat and dust show through the paint"),
        ),
        Step(
            "Fill all of the holes with {filler}.",
            (
                "press some {filler} in all the holes you find",
                "close all cracks and holes with a little {filler}",
            ),
            ("paint does not hide everything", "old nails leave their marks"),
        ),
        Step(
            "Sand the {subject} with {paper} until it is smooth.",
            (
                "rub the {subject} with {paper} until it is smooth",
                "go over the {subject} with {paper} until the old paint is smooth",
            ),
            ("old paint is never really smooth", "paint likes to have something to hold on to"),
        ),
        Step(
            "Paint a thin coat on the {subject} with {brush}.",
            (
                "use {brush} to put a thin coat on the {subject}",
                "take {brush} and bring a thin coat of color on the {subject}",
            ),
            ("thick paint takes too long to dry", "a thin coat lasts longer"),
            required=True,
        ),
        Step(
            "Let the wet paint dry for {dry}.",
            (
                "keep your fingers off the wet paint for {dry}",
                "leave the paint alone for {dry} until it is hard",
            ),
            ("fresh paint takes every mark", "children and dogs like wet paint"),
        ),
        Step(
            "Add a second coat of {color} on top.",
            (
                "go over everything with a new coat of {color}",
                "put more {color} on top of the first coat",
            ),
            ("the old color may still show", "one coat is too thin to last"),
        ),
    ),
    remarks=(
        "old clothes are best for this kind of work",
        "open a window if you do not like the smell",
        "you can always change the color next year",
    ),
)

_CAMPING = Topic(
    name="camping",
    titles=("Pack for a trip to", "Get ready to camp in", "Prepare for a week in"),
    title_endings=(
        (
            "with your children",
            "with friends",
            "with your dog",
            "on your own",
            "with an old car",
            "with a small bag",
        ),
        (
            "in summer",
            "in fall",
            "in spring",
            "for the first time",
            "on a small budget",
            "in one day",
        ),
    ),
    subjects=("the mountains", "the forest", "the desert", "the valley", "the hills"),
    slots={
        "medium": ("on paper", "on your phone", "on a card"),
        "tent": (
            "light tent|tent that is not heavy",
            "large tent|tent with a lot of room",
            "strong tent|tent that does not break in the wind",
        ),
        "clothes": ("shirts", "socks", "towels"),
        "food": ("dry fruit", "nuts", "oats", "beans"),
        "liters": ("2 liters|two liters", "3 liters|three liters", "4 liters|four liters"),
        "contact": ("a friend", "your sister", "your neighbors"),
    },
    steps=(
        Step(
            "Check the wind and rain in {subject}.",
            (
                "find out if there will be wind and rain in {subject}",
                "read the news about wind and rain in {subject}",
            ),
            ("the sky can change in an hour", "a wet night is no fun"),
        ),
        Step(
            "Write down all the things you need {medium}.",
            (
                "note all the things you will need {medium}",
                "make a list of the things you need {medium}",
            ),
            ("it is easy to forget something", "your head is full of other things"),
        ),
        Step(
            "Bring a {tent} to sleep in.",
            ("take a {tent} to sleep in", "look for a {tent} and sleep in it"),
            ("a good night is half of the fun", "a bad tent breaks on the first night"),
            required=True,
        ),
        Step(
            "Roll up your {clothes} to make them small.",
            (
                "make small rolls out of your {clothes}",
                "turn your {clothes} into rolls to make them small",
            ),
            ("there is never enough room in a bag", "big things take up too much room"),
        ),
        Step(
            "Pack some bags of {food} to eat.",
            (
                "put some bags of {food} with the things you want to eat",
                "buy some bags of {food} so that nobody goes hungry",
            ),
            ("fresh food goes bad in the heat", "there is no shop out there"),
        ),
        Step(
            "Carry {liters} of water in your bottles.",
            (
                "fill your bottles with {liters} of water",
                "have {liters} of water with you in bottles",
            ),
            ("a long walk makes you thirsty", "you may not find clean water"),
        ),
        Step(
            "Tell {contact} where you want to go.",
            (
                "let {contact} know where you go and when you come back",
                "talk to {contact} about the way you want to go",
            ),
            ("it is good when others know where you are", "your phone may not work out there"),
        ),
    ),
    remarks=(
        "the sky is wonderful out there",
        "birds will wake you up early",
        "you need less than you think",
    ),
)

_LAUNDRY = Topic(
    name="laundry",
    titles=("Wash your", "Take care of your", "Clean your"),
    title_endings=(
        (
            "at home",
            "by hand",
            "without a machine",
            "in a small home",
            "on a trip",
            "on a small budget",
        ),
        (
            "in winter",
            "in summer",
            "for the first time",
            "after a party",
            "after a long trip",
            "in a rush",
        ),
    ),
    subjects=(
        "wool sweater",
        "silk shirt",
        "cotton dress",
        "winter coat",
        "school shirt",
        "wool coat",
    ),
    slots={
        "cleaner": CLEANERS,
        "water": TAP_WATER,
        "soap": ("mild soap", "baby soap", "wool soap"),
        "times": ("twice|two times", "3 times|three times"),
        "towel": ("a thick towel", "a white towel", "a large towel"),
        "place": ("in the shade", "on a rack", "on a flat board"),
    },
    steps=(
        Step(
            "Read what the label in the {subject} says.",
            (
                "look for the small label inside the {subject} and see what it says",
                "find out what the label in the {subject} asks for",
            ),
            ("some things should never get wet", "each kind of cloth is different"),
        ),
        Step(
            "Treat the stains with a drop of {cleaner}.",
            (
                "put a drop of {cleaner} on the stains and wait a little",
                "rub a drop of {cleaner} on all the stains you can see",
            ),
            ("old spots are hard to get off", "soap alone may not be enough"),
        ),
        Step(
            "Fill half of a tub with {water}.",
            (
                "let {water} run until the tub is half full",
                "pour {water} in a tub until you have half of it full",
            ),
            ("hot water makes things smaller", "cloth needs room to move"),
        ),
        Step(
            "Wash the {subject} by hand with {soap}.",
            (
                "move the {subject} up and down with a little {soap}",
                "use {soap} and press the {subject} with your hand",
            ),
            ("strong soap is bad for fine cloth", "a machine may pull too hard"),
            required=True,
        ),
        Step(
            "Rinse the {subject} in fresh water {times}.",
            (
                "take fresh water for the {subject} {times}",
                "get the soap out of the {subject} with fresh water {times}",
            ),
            ("old soap begins to smell", "soap leaves white spots"),
        ),
        Step(
            "Roll the wet {subject} in {towel}.",
            (
                "put {towel} around the {subject} and press the water out",
                "use {towel} to take the water out of the {subject}",
            ),
            ("wet cloth is heavy and can lose its form", "it takes days to dry by itself"),
        ),
        Step(
            "Dry the wet {subject} {place}.",
            (
                "leave the {subject} {place} until it is no longer wet",
                "find room for the wet {subject} {place}",
            ),
            ("strong heat makes things smaller", "the sun takes the color away"),
        ),
    ),
    remarks=(
        "good things last for many years",
        "your clothes will smell wonderful",
        "a shop asks a lot of money for the same work",
    ),
)

_SPEECH = Topic(
    name="speech",
    titles=("Give a speech at", "Prepare a speech for", "Say a few words at"),
    title_endings=(
        (
            "in a short time",
            "in a loud room",
            "in a large room",
            "without fear",
            "with a smile",
            "with a friend",
        ),
        (
            "for the first time",
            "in one week",
            "on a busy day",
            "when you are shy",
            "when you are tired",
            "when nobody helps you",
        ),
    ),
    subjects=("the wedding", "the party", "the meeting", "the school", "the dinner", "the club"),
    slots={
        "paper": ("small cards", "blue paper", "one page"),
        "opening": ("a joke", "a short story", "a question"),
        "listener": ("a mirror", "a friend", "your sister", "your dog"),
        "people": ("the last row|the people at the back", "the first row|the people at the front"),
        "seconds": ("2 seconds|two seconds", "3 seconds|three seconds"),
        "length": SHORT_TIMES,
    },
    steps=(
        Step(
            "Find out who will be at {subject}.",
            (
                "ask what kind of people will come to {subject}",
                "learn a little about the people who will be at {subject}",
            ),
            ("children and old people like different things", "people are not all the same"),
        ),
        Step(
            "Write what you want to say on {paper}.",
            ("put all you want to say on {paper}", "take {paper} and note your own words there"),
            ("it is easy to forget something", "your head may be empty when you stand there"),
        ),
        Step(
            "Begin with {opening} as your first words.",
            (
                "use {opening} for your very first words",
                "make people listen with {opening} at the start",
            ),
            ("people decide very fast if they like you", "a slow start makes people tired"),
        ),
        Step(
            "Practice in front of {listener} at home.",
            (
                "go over your words at home while {listener} looks at you",
                "stand up and say it all to {listener} first",
            ),
            ("the first try is never good", "words sound different when you say them"),
            required=True,
        ),
        Step(
            "Look at {people} while you talk.",
            (
                "keep your eyes on {people} while you talk",
                "turn your face to {people} when you talk",
            ),
            ("people like to know that you see them", "your voice goes where your eyes go"),
        ),
        Step(
            "Pause for {seconds} from time to time.",
            (
                "stop and say nothing for {seconds} from time to time",
                "take a rest for {seconds} now and then",
            ),
            ("people need time to think", "fear makes you talk too fast"),
        ),
        Step(
            "Finish what you have to say in {length}.",
            (
                "come to an end with what you want to say in {length}",
                "make sure to say all that you have to say in {length}",
            ),
            ("people want to eat and talk", "a short talk is a good talk"),
        ),
    ),
    remarks=(
        "fear is normal and goes away",
        "most people want you to do well",
        "a glass of water is good for your voice",
    ),
)

_PHOTOS = Topic(
    name="photos",
    titles=("Take pictures of", "Take better pictures of", "Get good pictures of"),
    title_endings=(
        (
            "with your phone",
            "with an old camera",
            "with a small camera",
            "in your garden",
            "in the city",
            "on a trip",
        ),
        (
            "in winter",
            "in summer",
            "for the first time",
            "on a rainy day",
            "on a small budget",
            "with your children",
        ),
    ),
    subjects=("birds", "flowers", "dogs", "horses", "houses", "boats"),
    slots={
        "device": ("camera", "phone", "battery"),
        "cloth": CLOTHS,
        "light": (
            "at sunrise|when the sun comes up",
            "at sunset|when the sun goes down",
            "at noon|when the sun is high",
        ),
        "meters": ("2 meters|two meters", "3 meters|three meters", "10 meters|ten meters"),
        "support": ("a wall", "a rock", "your knees"),
        "shots": ("10 pictures|ten pictures", "20 pictures|twenty pictures"),
        "storage": ("your computer", "a disk", "a card"),
    },
    steps=(
        Step(
            "Charge the {device} the night before.",
            (
                "let the {device} fill up with power on the night before you go",
                "give the {device} a few hours of power on the last night",
            ),
            ("power runs out at the wrong time", "cold air eats up the power"),
        ),
        Step(
            "Clean the dust off the lens with {cloth}.",
            (
                "rub the lens in small circles with {cloth}",
                "take {cloth} and get the dust off the lens",
            ),
            ("each finger leaves a mark on the glass", "dust makes every picture look dark"),
        ),
        Step(
            "Go out to find the {subject} {light}.",
            ("go out and look for the {subject} {light}", "be there with the {subject} {light}"),
            ("light makes or breaks a picture", "the light can change in an hour"),
            required=True,
        ),
        Step(
            "Stand {meters} from the {subject}.",
            (
                "keep about {meters} away from the {subject}",
                "leave {meters} free between you and the {subject}",
            ),
            ("things look small from far away", "animals and people need room"),
        ),
        Step(
            "Keep your arms steady with {support}.",
            (
                "look for {support} and keep your arms still",
                "use {support} as a place to rest your arms",
            ),
            ("no hand is steady all day", "the picture is not sharp when you shake"),
        ),
        Step(
            "Take {shots} of the {subject}.",
            (
                "go on until you have {shots} of the {subject}",
                "make {shots} while the {subject} are in front of you",
            ),
            ("the first try is never good", "one of them will be better than the rest"),
        ),
        Step(
            "Save the best pictures on {storage}.",
            (
                "put the best of the pictures on {storage}",
                "keep the pictures you like to see again on {storage}",
            ),
            ("it is easy to lose a small camera", "good pictures last for many years"),
        ),
    ),
    remarks=(
        "even the best have bad days",
        "you need less than you think",
        "your friends will want to see them",
    ),
)

_MUSIC = Topic(
    name="music",
    titles=("Learn to play the", "Start to play the", "Get better at the"),
    title_endings=(
        (
            "at home",
            "on your own",
            "with a friend",
            "with your child",
            "in a small home",
            "on a small budget",
        ),
        (
            "in one month",
            "in one summer",
            "for the first time",
            "when you are old",
            "when you work all day",
            "without a teacher",
        ),
    ),
    subjects=("guitar", "trumpet", "violin", "flute", "banjo", "harp"),
    slots={
        "lender": ("a friend", "a school", "a shop"),
        "warm": SHORT_TIMES,
        "song": (
            "a slow song|a song that is not fast",
            "an easy song|a song that is not hard",
            "a short song|a song that is not long",
        ),
        "often": HOW_OFTEN,
        "beat": ("a clock", "your foot", "a drum"),
        "device": ("phone", "computer", "camera"),
        "listener": ("your family", "your sister", "your neighbors"),
    },
    steps=(
        Step(
            "Borrow a {subject} from {lender}.",
            (
                "ask {lender} for a {subject} you can use for the first weeks",
                "get a {subject} from {lender} until you know more",
            ),
            ("a new one costs a lot of money", "you may not like it in the end"),
        ),
        Step(
            "Warm up all of your fingers for {warm}.",
            (
                "move all of your fingers slowly for {warm}",
                "do easy things with your fingers for {warm}",
            ),
            ("cold hands make mistakes", "your hands may hurt without it"),
        ),
        Step(
            "Learn to play {song} first.",
            ("look for {song} and learn that one first", "make {song} the first thing you play"),
            ("a hard piece takes the fun away", "small steps lead to big ones"),
        ),
        Step(
            "Make time to practice the {subject} {often}.",
            ("pick up the {subject} and play {often}", "make time to play the {subject} {often}"),
            ("hands forget what they do not do", "a little each time is better than a lot at once"),
            required=True,
        ),
        Step(
            "Use {beat} to keep time while you play.",
            (
                "use {beat} to mark the beat while you play",
                "let {beat} tell you how fast you have to play",
            ),
            ("it is easy to go too fast", "a steady beat holds a song together"),
        ),
        Step(
            "Record how you sound with your {device}.",
            (
                "let your {device} listen to how you play and then hear it again",
                "use the {device} to hear how you sound to others",
            ),
            ("it is hard to play and listen at once", "others hear what you do not"),
        ),
        Step(
            "Play what you have learned for {listener}.",
            (
                "ask {listener} to sit down and listen to what you play",
                "show {listener} what you have learned",
            ),
            ("music is more fun with others", "it takes away the fear"),
        ),
    ),
    remarks=(
        "even the best have bad days",
        "it will not sound good on the first day",
        "your neighbors may hear you",
    ),
)

TOPICS = (
    _RICE,
    _SOUP,
    _BREAD,
    _PLANTS,
    _BIKE,
    _CLEANING,
    _STUDY,
    _PETS,
    _PAINTING,
    _CAMPING,
    _LAUNDRY,
    _SPEECH,
    _PHOTOS,
    _MUSIC,
)
