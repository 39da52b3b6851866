"""Signatures estimate Jaccard similarity, and clusters are those of the definition."""

from __future__ import annotations

import random

import numpy as np

from dspark.data.filters.minhash import ENTRIES, clusters, signatures
from dspark.data.filters.units import word_units, words_of


def shingles(text, size=3):
    words = words_of(text)
    if len(words) < size:
        return {tuple(words)}
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def jaccard(a, b):
    return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))


def random_text(rng, words):
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(words))


def changed(rng, text, count):
    words = text.split()
    for place in rng.sample(range(len(words)), count):
        words[place] = f"x{rng.randrange(10**9)}"
    return " ".join(words)


def sign(texts, shingle=3):
    return signatures(word_units([text] for text in texts), len(texts), shingle)


def test_equal_entries_estimate_the_similarity_without_bias():
    rng = random.Random(1)
    errors = []
    for count in (0, 1, 2, 4, 8, 16) * 12:
        text = random_text(rng, 60)
        other = changed(rng, text, count)
        a, b = sign([text, other])
        errors.append((a == b).mean() - jaccard(text, other))
    assert abs(np.mean(errors)) < 0.015
    assert np.std(errors) < 0.05


def test_a_signature_does_not_depend_on_its_neighbours():
    rng = random.Random(2)
    texts = [random_text(rng, n) for n in (1, 2, 3, 40, 7)] + ["", "!!"]
    alone = [sign([text])[0] for text in texts]
    assert np.array_equal(np.array(alone), sign(texts))
    assert sign([]).shape == (0, ENTRIES)


def test_clusters_are_the_connected_groups_of_similar_rows():
    rng = random.Random(3)
    texts, groups = [], []
    for group in range(40):
        base = random_text(rng, 80)
        for _ in range(rng.randrange(1, 6)):
            texts.append(changed(rng, base, rng.choice((0, 1, 2))))
            groups.append(group)
    order = list(range(len(texts)))
    rng.shuffle(order)
    texts, groups = [texts[i] for i in order], [groups[i] for i in order]
    found = clusters(sign(texts), np.arange(len(texts)), 0.7)
    first = {group: groups.index(group) for group in set(groups)}
    assert found.tolist() == [first[group] for group in groups]


def test_the_first_in_the_given_order_is_kept():
    table = sign(["a b c d e f", "something quite different from it", "A b c, d e f!"])
    assert clusters(table, np.array([2, 1, 0]), 0.7).tolist() == [0, 1, 0]
    assert clusters(table, np.array([], dtype=np.int64), 0.7).tolist() == []


def test_rows_below_the_threshold_stay_apart_although_they_share_bands():
    rng = random.Random(4)
    texts = []
    for _ in range(20):
        base = random_text(rng, 60)
        texts += [base, changed(rng, base, 9)]
    table = sign(texts)
    bands = table.view(np.uint64)
    assert sum((bands[i] == bands[i + 1]).any() for i in range(0, 40, 2)) > 10
    assert max(jaccard(texts[i], texts[i + 1]) for i in range(0, 40, 2)) < 0.6
    assert clusters(table, np.arange(40), 0.7).tolist() == list(range(40))
    assert set(clusters(table, np.arange(2), 0.5).tolist()) <= {0, 1}


def test_a_chain_of_bands_becomes_one_cluster():
    rng = random.Random(5)
    texts = [random_text(rng, 100)]
    for _ in range(30):
        texts.append(changed(rng, texts[-1], 1))
    assert jaccard(texts[0], texts[-1]) < 0.7
    assert set(clusters(sign(texts), np.arange(31), 0.7).tolist()) == {0}
