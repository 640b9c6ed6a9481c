"""Word lists of the synthetic tasks."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


IRREGULAR_NOUNS = {
    "man": "men", "woman": "women", "child": "children", "foot": "feet", "tooth": "teeth", "goose": "geese", "mouse": "mice",
    "ox": "oxen", "person": "people", "sheep": "sheep", "deer": "deer", "fish": "fish", "leaf": "leaves", "knife": "knives",
    "wife": "wives", "life": "lives", "wolf": "wolves", "half": "halves", "shelf": "shelves", "loaf": "loaves", "thief": "thieves",
    "calf": "calves", "potato": "potatoes", "tomato": "tomatoes", "hero": "heroes", "echo": "echoes", "scarf": "scarves",
}  # fmt: skip

REGULAR_NOUNS = _words("""
    apple arm army baby bag ball band bank basket bath beach bear bed bee bell belt bench berry bike bird blanket board boat body bone
    book boot bottle bowl box boy branch bridge brother brush bucket bus bush butterfly button cake camera camp candle car card carrot
    castle cat chair cherry church circle city class clock cloud coat coin country cow cross cup curtain daisy day desk diary dish doctor
    dog doll door dress driver duck ear eagle egg engine eye face factory family farmer fence ferry field finger flag floor flower forest
    fork fox friend frog game garden gate ghost girl glass glove goat guitar hammer hand hat head hill hobby horse house island jacket jar
    jelly jewel judge jug key king kitchen kite lady lake lamp letter library lion lizard lunch machine map market mask match monkey
    month moon mountain nail neck needle nest net night nurse oven owl page painter pan park party path pen pencil penny phone photo piano
    picture pig pillow pirate plane plate pocket pony pool puppy queen rabbit radio ring river road rocket roof room rope rose sandwich
    school ship shirt shoe shop singer sister sky snake sock spider spoon star station stone stool story street table tail teacher tent
    ticket tiger toe torch town toy train tree truck turtle uncle valley village wall watch whale wheel window wing witch writer yard zoo
    """)

NOUNS = tuple(IRREGULAR_NOUNS) + REGULAR_NOUNS

IRREGULAR_VERBS = {
    "go": "went", "see": "saw", "eat": "ate", "run": "ran", "come": "came", "take": "took", "give": "gave", "make": "made",
    "know": "knew", "grow": "grew", "throw": "threw", "blow": "blew", "fly": "flew", "draw": "drew", "sing": "sang", "ring": "rang",
    "drink": "drank", "begin": "began", "swim": "swam", "write": "wrote", "ride": "rode", "drive": "drove", "rise": "rose",
    "speak": "spoke", "break": "broke", "wake": "woke", "choose": "chose", "steal": "stole", "freeze": "froze", "tell": "told",
    "sell": "sold", "hold": "held", "find": "found", "stand": "stood", "bring": "brought", "buy": "bought", "think": "thought",
    "catch": "caught", "teach": "taught", "fight": "fought", "keep": "kept", "sleep": "slept", "feel": "felt", "leave": "left",
    "meet": "met", "lose": "lost", "build": "built", "send": "sent", "spend": "spent", "lend": "lent", "hear": "heard", "say": "said",
    "pay": "paid", "sit": "sat", "win": "won", "dig": "dug", "get": "got", "forget": "forgot", "put": "put", "cut": "cut", "hit": "hit",
}  # fmt: skip

DOUBLING_VERBS = _words("stop plan drop clap hug jog rub slip step trip grab nod beg chat skip tap wrap shop")

REGULAR_VERBS = _words("""
    accept add admire agree allow answer arrive ask bake bathe believe boil borrow bounce breathe brush bury call carry cause change
    chase cheer clean climb close collect comb compare complain cook copy count cover cry dance decide deliver deny describe destroy dry
    dress dream earn empty enjoy enter escape explain fail fasten fill fix float fold follow fry gather greet guess hand happen
    hate help hope hunt hurry imagine invite join joke jump kick kiss knock land laugh learn like listen live load lock look love marry
    melt miss mix move name need notice obey offer open order own pack paint park pass pick plant play point polish post pour
    practise pray press promise pull push reach rely remember repair repeat reply rest return roll sail save scare shout
    smile smoke sneeze sound spell stare start stay study suggest supply taste thank touch trade treat trust try turn use visit
    wait walk want warn wash waste wave whisper whistle wish work worry yawn
    """)

VERBS = tuple(IRREGULAR_VERBS) + DOUBLING_VERBS + REGULAR_VERBS

ANTONYMS = tuple(
    tuple(pair.split("-"))
    for pair in _words("""
    hot-cold big-small high-low fast-slow good-bad happy-sad old-new rich-poor strong-weak wet-dry hard-soft long-short thick-thin
    clean-dirty full-empty light-dark open-closed early-late near-far loud-quiet up-down left-right in-out on-off over-under above-below
    before-after front-back top-bottom inside-outside north-south east-west day-night summer-winter black-white war-peace love-hate
    life-death truth-lie friend-enemy winner-loser buyer-seller teacher-student parent-child husband-wife king-queen man-woman boy-girl
    brother-sister uncle-aunt father-mother son-daughter host-guest question-answer beginning-end success-failure victory-defeat
    profit-loss arrive-leave come-go push-pull give-take buy-sell win-lose laugh-cry start-stop rise-fall
    borrow-lend build-destroy accept-refuse remember-forget find-hide lock-unlock tie-untie enter-exit attack-defend float-sink
    increase-decrease expand-shrink freeze-melt sleep-wake stand-sit throw-catch praise-blame save-spend ask-reply add-subtract
    multiply-divide always-never often-rarely all-none many-few more-less everything-nothing everywhere-nowhere someone-nobody
    yes-no true-false cheap-expensive safe-dangerous brave-cowardly polite-rude careful-careless useful-useless easy-difficult
    simple-complex smooth-rough sharp-blunt wide-narrow deep-shallow young-elderly sweet-bitter fresh-rotten raw-cooked
    alive-dead awake-asleep absent-present ancient-modern calm-nervous clever-stupid guilty-innocent generous-selfish
    kind-cruel lazy-busy legal-illegal possible-impossible visible-invisible lucky-unlucky fair-unfair equal-unequal known-unknown
    married-single male-female maximum-minimum major-minor public-private permanent-temporary natural-artificial normal-strange
    first-last best-worst straight-curved tight-loose tame-wild plain-fancy proud-ashamed patient-impatient
    optimist-pessimist ceiling-floor sunrise-sunset heaven-hell giant-dwarf hero-villain import-export junior-senior
    vertical-horizontal interior-exterior positive-negative active-passive beautiful-ugly humble-arrogant solid-liquid urban-rural
    """)
)  # fmt: skip

UNITS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
)
TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")

COLOURS = _words("red green blue white black brown gold grey orange pink purple silver yellow")
PLACED = COLOURS + _words("dog cat horse bird fish lion tree river stone house")

SUBJECTS = _words("food service film story music acting ending room staff book hotel place show game price view")
OPINIONS = {
    "positive": _words("great good lovely wonderful excellent charming superb delightful fantastic perfect pleasant brilliant"),
    "negative": _words("bad awful terrible dull poor boring horrible weak disappointing dreadful ugly annoying"),
}
REVIEWS = (
    "the {} was {} and the {} was {}.",
    "i found the {} {} and the {} {}.",
    "we thought the {} was {}, and the {} was {} too.",
    "honestly, the {} is {} and the {} is {}.",
)

PEOPLE = _words("anna ben clara david emma frank grace henry iris jack kate leo maria noah olive paul rose sam tina victor")
FACT_VERBS = ("has", "wants", "bought", "found", "saw")
KINDS = {
    "animal": _words("dog cat horse rabbit sheep goat lion tiger monkey bear"),
    "fruit": _words("banana pear peach lemon cherry plum melon grape mango fig"),
    "vehicle": _words("car truck bus train bike boat ship van taxi tractor"),
    "tool": _words("hammer saw drill spade wrench ladder rake chisel screwdriver shovel"),
    "musical instrument": _words("piano guitar violin drum flute trumpet harp cello banjo clarinet"),
    "garment": _words("shirt coat jacket dress skirt sweater hat scarf sock glove"),
}

TOPICS = {
    "food": _words("soup bread cheese rice pasta salad pizza chicken butter chocolate sugar coffee"),
    "music": _words("song piano guitar violin drum concert melody singer orchestra flute trumpet chorus"),
    "sport": _words("football tennis golf hockey swimming boxing race goal team coach marathon tournament"),
    "weather": _words("rain snow storm wind fog thunder sunshine frost hail breeze drought heat"),
}
TOPIC_SENTENCES = (
    "{} talked about the {} all day.",
    "{} still remembers the {}.",
    "in the end {} liked the {}.",
    "{} wrote a letter about the {}.",
)

QUESTIONS = {
    "person": "who will {1} the {2} for {0}?",
    "place": "where did {0} {1} the {2}?",
    "time": "when did {0} {1} the {2}?",
    "number": "how many times did {0} {1} the {2}?",
}
QUESTION_VERBS = _words("paint clean open repair move buy find sell hide carry wash watch")
