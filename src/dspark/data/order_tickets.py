"""The quickstart's workload: order messages to be turned into JSON, three examples in the prompt.

Structured extraction with a fixed few-shot prompt is what many production deployments run all day,
and where speculative decoding earns most: the skeleton repeats, the values are copied from the
request. It is also a task a 135M-parameter target does correctly most of the time. It is narrow on
purpose, and says so: figures measured on it do not carry over to open conversation, which is why
the report prints general prompts beside it.

A ticket is a pure function of ``(seed, split, index)``. Held-out tickets share the phrasings with
training tickets but never a whole text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

from dspark.data.prompt import Split
from dspark.data.streams import distinct

SYSTEM = "Turn each order into JSON."

# fmt: off
CUSTOMERS = (
    "Tom", "Mia", "Sam", "Ana", "Ben", "Lily", "Jack", "Emma", "Rosa", "Omar", "Nina", "Paul",
    "Vera", "Hugo", "Iris", "Leon", "Maya", "Noah", "Olga", "Pete", "Ruth", "Seth", "Tina",
    "Uma", "Walt", "Yara", "Zoe", "Adam", "Beth", "Carl", "Dora", "Eric", "Fay", "Gus", "Hana",
    "Ivan", "Jane", "Kurt", "Lena", "Max",
)
# fmt: on
# fmt: off
CITIES = (
    "Lima", "Oslo", "Paris", "Cairo", "Quito", "Delhi", "Rome", "Kyoto", "Berlin", "Madrid",
    "Lisbon", "Vienna", "Prague", "Dublin", "Athens", "Boston", "Denver", "Austin", "Miami",
    "Seoul", "Tokyo", "Sydney", "Perth", "Bogota", "Havana", "Tunis", "Dakar", "Accra", "Riga",
    "Turin",
)
# fmt: on
# fmt: off
ITEMS = (
    "apples", "pencils", "marbles", "books", "cookies", "stickers", "lamps", "chairs", "tables",
    "mugs", "plates", "spoons", "towels", "candles", "baskets", "brushes", "pillows",
    "blankets", "boxes", "bottles", "buttons", "ribbons", "hats", "scarves", "gloves", "belts",
    "clocks", "mirrors", "kettles", "pans",
)
# fmt: on
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

PHRASINGS = (
    "{customer} from {city} ordered {quantity} {item} at {price} dollars each for {day}.",
    "Send {quantity} {item} to {customer} in {city} on {day}. Each costs {price} dollars.",
    "{quantity} {item} for {customer}, {city}, {day} delivery, {price} dollars each.",
    "Please deliver {quantity} {item} to {customer} in {city} on {day} at {price} dollars each.",
    "On {day} ship {quantity} {item} to {city} for {customer}. The price is {price} dollars each.",
    "{customer} wants {quantity} {item} by {day}. Ship to {city}. Price: {price} dollars each.",
    "New order: {quantity} {item}, {price} dollars each, for {customer} in {city}, due {day}.",
    "{day}: {customer} ({city}) needs {quantity} {item}. We charge {price} dollars each.",
)


@dataclass(frozen=True)
class Ticket:
    """An order message and the JSON a perfect answer would be."""

    text: str
    answer: str


def make_ticket(seed: int, index: int, split: Split = "train") -> Ticket:
    """The ticket at ``index`` of the endless stream ``(seed, split)``."""
    draw = random.Random(f"dspark order ticket/{split}/{seed}/{index}")
    order = {
        "customer": draw.choice(CUSTOMERS),
        "city": draw.choice(CITIES),
        "item": draw.choice(ITEMS),
        "quantity": draw.randint(2, 60),
        "price": draw.randint(2, 60),
        "day": draw.choice(DAYS),
    }
    return Ticket(draw.choice(PHRASINGS).format(**order), json.dumps(order, indent=2))


def examples() -> list[tuple[str, str]]:
    """The three worked examples that open every prompt (a stream of their own)."""
    tickets = [make_ticket(2026, index, "train") for index in range(3)]
    return [(ticket.text, ticket.answer) for ticket in tickets]


def order_tickets(seed: int, train: int, held_out: int) -> Iterator[tuple[Split, Ticket]]:
    """Exactly ``train`` and ``held_out`` tickets with different texts, training tickets first."""
    return distinct(
        lambda index, split: make_ticket(seed, index, split),
        lambda ticket: ticket.text,
        train,
        held_out,
        taken={text for text, _ in examples()},
        where=f"order ticket generator, seed {seed}",
    )
