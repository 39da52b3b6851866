"""A narrow, repetitive workload that anybody can rebuild: school maths word problems.

A draft earns its keep on traffic with repeated structure. Production logs cannot be shipped, so
this generator stands in for one: sixteen situations (shopping, sharing, travel, baking, saving,
school, gardens...) filled with names, things and small numbers, always closed by the same
instruction. It is an honest stand-in and no benchmark: figures measured on it say how a draft
does on traffic it was trained for, not how it does on language at large.

Every problem is a pure function of ``(seed, split, index)``. Only ``random.Random.random`` is used,
the one method whose sequence Python promises to keep, so the text is equal in every process, on
every platform and in every Python version. The two splits draw from separate seed namespaces;
:func:`word_problems` also compares texts, because two random draws can still coincide.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dspark.data.prompt import Split
from dspark.data.streams import distinct
from dspark.errors import DataError

T = TypeVar("T")

INSTRUCTION = "Answer in a few short sentences and finish with the result."


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ada Amir Anna Ben Carla Chen Clara David Dina Elif Emma Erik Farid Finn Grace Hana Hugo Ines "
    "Ivan Jack Jana Jonas Kofi Lara Leo Lina Luca Maya Mei Mia Nadia Nils Nora Omar Oscar Paula "
    "Priya Rosa Sam Sara Simon Sofia Tariq Tom Vera Yara Yusuf Zoe"
)
GOODS = _words(
    "notebooks pencils markers erasers folders brushes candles mugs puzzles socks scarves cushions "
    "plates spoons baskets postcards calendars magnets lamps towels"
)
SMALL_THINGS = _words(
    "stickers marbles shells buttons beads stamps coins cards balloons badges sweets cherries "
    "walnuts grapes almonds biscuits"
)
BAKED = _words("muffins cookies rolls scones pretzels buns tarts waffles cupcakes brownies")
FRUIT = _words("apples pears plums peaches lemons oranges figs apricots")
PLANTS = _words(
    "tulips carrots lettuces onions roses daisies beans tomatoes radishes sunflowers leeks"
)
VEHICLES = ("bus", "train", "car", "coach", "van", "tram")
PLACES = ("market", "school fair", "corner shop", "museum shop", "flea market", "stationery shop")
WISHES = ("bicycle", "tent", "guitar", "camera", "skateboard", "telescope", "kite", "drum kit")
HOBBIES = ("the piano", "the violin", "chess", "juggling", "the flute", "Spanish", "drawing")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
TIMES = {2: "twice", 3: "three times", 4: "four times"}


@dataclass(frozen=True)
class Problem:
    """One problem: the prompt text, its exact integer result and the family it came from."""

    text: str
    answer: int
    family: str


class Draw:
    """Picks from one seeded stream; the only source of chance in this module."""

    def __init__(self, key: str) -> None:
        self._random = random.Random(key).random

    def number(self, low: int, high: int) -> int:
        """An integer in ``[low, high]``, both ends included."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, items: Sequence[T]) -> T:
        """One of ``items``, each equally likely."""
        return items[self.number(0, len(items) - 1)]

    def two_names(self) -> tuple[str, str]:
        """Two different names."""
        first = self.number(0, len(NAMES) - 1)
        second = (first + self.number(1, len(NAMES) - 1)) % len(NAMES)
        return NAMES[first], NAMES[second]


def _shopping(d: Draw) -> tuple[str, int]:
    name, goods, n, price = d.pick(NAMES), d.pick(GOODS), d.number(2, 12), d.number(2, 15)
    return (
        f"{name} buys {n} {goods} at the {d.pick(PLACES)}. The {goods} cost {price} dollars each. "
        f"How many dollars does {name} pay in total?"
    ), n * price


def _change(d: Draw) -> tuple[str, int]:
    name, goods, n, price = d.pick(NAMES), d.pick(GOODS), d.number(2, 9), d.number(2, 11)
    note = next(note for note in (10, 20, 50, 100) if note > n * price)
    return (
        f"{name} buys {n} {goods} for {price} dollars each and pays with a {note} dollar note. "
        f"How many dollars does {name} get back?"
    ), note - n * price


def _sharing(d: Draw) -> tuple[str, int]:
    name, things, friends, each = (
        d.pick(NAMES),
        d.pick(SMALL_THINGS),
        d.number(2, 9),
        d.number(3, 15),
    )
    return (
        f"{name} has {friends * each} {things} and shares them equally among {friends} friends. "
        f"How many {things} does each friend get?"
    ), each


def _keep_and_share(d: Draw) -> tuple[str, int]:
    name, things, friends, each = (
        d.pick(NAMES),
        d.pick(SMALL_THINGS),
        d.number(2, 8),
        d.number(2, 12),
    )
    kept = d.number(2, 15)
    return (
        f"{name} collected {friends * each + kept} {things}. {name} keeps {kept} of them and "
        f"gives the rest to {friends} friends in equal parts. "
        f"How many {things} does each friend get?"
    ), each


def _travel(d: Draw) -> tuple[str, int]:
    vehicle, speed, hours = d.pick(VEHICLES), d.number(4, 12) * 10, d.number(2, 6)
    return (
        f"{d.pick(NAMES)} travels by {vehicle}. The {vehicle} drives {speed} kilometres "
        f"every hour, and the trip takes {hours} hours. How many kilometres long is the trip?"
    ), speed * hours


def _two_legs(d: Draw) -> tuple[str, int]:
    name, first, factor = d.pick(NAMES), d.number(5, 40), d.pick(tuple(TIMES))
    day = d.number(0, 5)
    return (
        f"On {DAYS[day]} {name} cycles {first} kilometres. On {DAYS[day + 1]} {name} cycles "
        f"{TIMES[factor]} as far. How many kilometres does {name} cycle on both days together?"
    ), first * (1 + factor)


def _baking(d: Draw) -> tuple[str, int]:
    (name, other), baked, trays, per = d.two_names(), d.pick(BAKED), d.number(2, 7), d.number(6, 16)
    given = d.number(2, trays * per - 2)
    return (
        f"{name} bakes {trays} trays of {baked} with {per} {baked} on each tray. "
        f"Then {name} gives {given} {baked} to {other}. How many {baked} are left?"
    ), trays * per - given


def _recipe(d: Draw) -> tuple[str, int]:
    name, people, factor, eggs = d.pick(NAMES), d.number(2, 6), d.number(2, 5), d.number(2, 8)
    dish = d.pick(("pancakes", "an omelette", "a pie", "a cake", "dumplings", "noodles"))
    return (
        f"A recipe for {dish} needs {eggs} eggs for {people} people. "
        f"{name} cooks for {people * factor} people. How many eggs does {name} need?"
    ), eggs * factor


def _saving(d: Draw) -> tuple[str, int]:
    name, start, weekly, weeks = d.pick(NAMES), d.number(5, 60), d.number(2, 15), d.number(2, 12)
    return (
        f"{name} has {start} dollars in a money box and puts in {weekly} dollars every week. "
        f"How many dollars are in the box after {weeks} weeks?"
    ), start + weekly * weeks


def _saving_goal(d: Draw) -> tuple[str, int]:
    name, start, weekly, weeks = d.pick(NAMES), d.number(5, 50), d.number(3, 15), d.number(2, 12)
    wish = d.pick(WISHES)
    return (
        f"{name} wants to buy a {wish} that costs {start + weekly * weeks} dollars. {name} already "
        f"has {start} dollars and saves {weekly} dollars every week. "
        f"How many weeks does {name} have to save?"
    ), weeks


def _classroom(d: Draw) -> tuple[str, int]:
    name, rows, seats = d.pick(NAMES), d.number(3, 9), d.number(3, 8)
    empty = d.number(2, min(12, rows * seats - 2))
    return (
        f"The classroom of {name} has {rows} rows with {seats} seats in each row. "
        f"Today {empty} seats are empty. How many pupils are sitting in the classroom?"
    ), rows * seats - empty


def _reading(d: Draw) -> tuple[str, int]:
    name, daily, days, left = d.pick(NAMES), d.number(6, 30), d.number(2, 9), d.number(5, 90)
    return (
        f"{name} reads a book with {daily * days + left} pages. {name} reads {daily} pages a day "
        f"for {days} days. How many pages are left to read?"
    ), left


def _garden(d: Draw) -> tuple[str, int]:
    name, plants, rows, per = d.pick(NAMES), d.pick(PLANTS), d.number(3, 9), d.number(4, 12)
    lost = d.number(2, rows * per // 2)
    return (
        f"{name} plants {rows} rows of {plants} in the garden, with {per} {plants} in each row. "
        f"In the spring {lost} of them do not grow. How many {plants} grow?"
    ), rows * per - lost


def _passengers(d: Draw) -> tuple[str, int]:
    vehicle, start, on = (
        d.pick(("bus", "train", "tram", "ferry")),
        d.number(12, 60),
        d.number(2, 20),
    )
    off = d.number(2, start - 2)
    return (
        f"{d.pick(NAMES)} takes a {vehicle} with {start} people on board. At the first stop {off} "
        f"people get off and {on} people get on. How many people are on board now?"
    ), start - off + on


def _picking(d: Draw) -> tuple[str, int]:
    (name, other), fruit, first, more = (
        d.two_names(),
        d.pick(FRUIT),
        d.number(8, 50),
        d.number(2, 25),
    )
    return (
        f"{name} picks {first} {fruit}. {other} picks {more} {fruit} more than {name}. "
        f"How many {fruit} do they have together?"
    ), 2 * first + more


def _practice(d: Draw) -> tuple[str, int]:
    name, minutes, days, extra = (
        d.pick(NAMES),
        d.number(3, 12) * 5,
        d.number(2, 5),
        d.number(4, 18) * 5,
    )
    return (
        f"{name} practises {d.pick(HOBBIES)} for {minutes} minutes a day on {days} school days. "
        f"On Saturday {name} practises for {extra} minutes. "
        f"How many minutes does {name} practise in total?"
    ), minutes * days + extra


FAMILIES: dict[str, Callable[[Draw], tuple[str, int]]] = {
    "shopping": _shopping,
    "change": _change,
    "sharing": _sharing,
    "keep_and_share": _keep_and_share,
    "travel": _travel,
    "two_legs": _two_legs,
    "baking": _baking,
    "recipe": _recipe,
    "saving": _saving,
    "saving_goal": _saving_goal,
    "classroom": _classroom,
    "reading": _reading,
    "garden": _garden,
    "passengers": _passengers,
    "picking": _picking,
    "practice": _practice,
}


def make_problem(seed: int, index: int, split: Split = "train") -> Problem:
    """The problem at ``index`` of the endless stream ``(seed, split)``.

    Raises:
        DataError: ``seed`` or ``index`` is negative.
    """
    if seed < 0 or index < 0:
        raise DataError(
            expected="a seed and an index of at least 0",
            found=f"seed {seed}, index {index}",
            where="word problem generator",
            fix="Use non-negative numbers.",
        )
    draw = Draw(f"dspark word problem/{split}/{seed}/{index}")
    family = draw.pick(tuple(FAMILIES))
    question, answer = FAMILIES[family](draw)
    return Problem(f"{question} {INSTRUCTION}", answer, family)


def word_problem(seed: int, index: int, split: Split = "train") -> str:
    """Text of :func:`make_problem`: one to three sentences, a question and the instruction."""
    return make_problem(seed, index, split).text


def word_problems(seed: int, train: int, held_out: int) -> Iterator[tuple[Split, str]]:
    """Exactly ``train`` and ``held_out`` different prompts, training prompts first.

    Held-out prompts are new to a draft trained on the training prompts.

    Raises:
        DataError: more distinct prompts were asked for than the templates reasonably hold.
    """
    return distinct(
        lambda index, split: word_problem(seed, index, split),
        str,
        train,
        held_out,
        taken=set(),
        where=f"word problem generator, seed {seed}",
    )
