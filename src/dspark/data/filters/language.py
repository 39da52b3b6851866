"""Which language a prompt is in: as declared by its source, else from script and common words.

Meant for keeping languages apart in bulk, not for telling Bokmål from Danish. A script used by one
major language names it (Hangul, Kana, Thai, Greek, ...); Han without Kana is Chinese; Latin and
Cyrillic text is decided by its most frequent short words. What gives no evidence is ``und``, which
the language filter drops, so that nothing passes on a guess.
"""

from __future__ import annotations

import re
from collections import Counter

UNKNOWN = "und"
_SAMPLE = 600  # characters that are looked at
_SCRIPTS = (
    ("ja", re.compile(r"[\u3040-\u30ff]")),
    ("ko", re.compile(r"[\uac00-\ud7af]")),
    ("zh", re.compile(r"[\u4e00-\u9fff]")),
    ("th", re.compile(r"[\u0e00-\u0e7f]")),
    ("el", re.compile(r"[\u0370-\u03ff]{2}")),
    ("he", re.compile(r"[\u0590-\u05ff]")),
    ("hi", re.compile(r"[\u0900-\u097f]")),
    ("bn", re.compile(r"[\u0980-\u09ff]")),
    ("ta", re.compile(r"[\u0b80-\u0bff]")),
    ("te", re.compile(r"[\u0c00-\u0c7f]")),
    ("ka", re.compile(r"[\u10a0-\u10ff]")),
    ("hy", re.compile(r"[\u0530-\u058f]")),
)
_PERSIAN = re.compile(r"[\u067e\u0686\u0698\u06af]")
_ARABIC = re.compile(r"[\u0600-\u06ff]")
_UKRAINIAN = re.compile(r"[іїєґ]")
_CYRILLIC = re.compile(r"[\u0400-\u04ff]")
_LETTER = re.compile(r"[^\W\d_]+")
_COMMON = {
    "en": "the of and to in is that for it with as on be are this what how you write a an from",
    "de": "der die das und ist nicht ein eine zu mit den von wie für auf ich sie des im dem was",
    "fr": "le la les de des et est une un pour que dans qui sur pas du au ce avec je vous quelle",
    "es": "el la los las de que y en un una es por con para se del cómo qué su al como más",
    "pt": "o a os as de que e em um uma é por com para se do da não como no na mais",
    "it": "il la di che e un una è per con non del della sono come gli le nel si da",
    "nl": "de het een en van is dat op te in voor met niet zijn wat hoe je er aan",
    "pl": "i w na z do że się nie jest to co jak dla po od przez czy są",
    "tr": "ve bir bu için ile de da ne olan nasıl mi gibi çok en var",
    "vi": "và của là có không cho trong một được các những này với người như",
    "id": "yang dan di untuk dari dengan ini itu pada adalah tidak ke dalam apa bagaimana",
    "sv": "och det att en som är för på med inte av den till om har hur",
}
_SPOKEN_IN = {
    word: tuple(code for code, words in _COMMON.items() if word in words.split())
    for words in _COMMON.values()
    for word in words.split()
}
# ISO 639-3 codes and English names that published sets use in their language columns.
_NAMES = {
    "eng": "en", "english": "en", "deu": "de", "german": "de", "fra": "fr", "french": "fr",
    "spa": "es", "spanish": "es", "por": "pt", "portuguese": "pt", "ita": "it", "italian": "it",
    "nld": "nl", "dutch": "nl", "pol": "pl", "polish": "pl", "tur": "tr", "turkish": "tr",
    "vie": "vi", "vietnamese": "vi", "ind": "id", "indonesian": "id", "swe": "sv",
    "swedish": "sv", "zho": "zh", "cmn": "zh", "chinese": "zh", "simplified chinese": "zh",
    "traditional chinese": "zh", "jpn": "ja", "japanese": "ja", "kor": "ko", "korean": "ko",
    "rus": "ru", "russian": "ru", "ukr": "uk", "ukrainian": "uk", "arb": "ar", "ara": "ar",
    "arabic": "ar", "standard arabic": "ar", "fas": "fa", "pes": "fa", "persian": "fa",
    "iranian persian": "fa", "hin": "hi", "hindi": "hi", "ben": "bn", "bengali": "bn",
    "tam": "ta", "tamil": "ta", "tel": "te", "telugu": "te", "tha": "th", "thai": "th",
    "ell": "el", "greek": "el", "heb": "he", "hebrew": "he",
}  # fmt: skip


def language_of(texts: list[str], declared: str | None) -> str:
    """Two- or three-letter code of what a row declares, or of what its texts look like."""
    if declared is not None:
        name = declared.strip().casefold()
        return _NAMES.get(name, name.split("-")[0].split("_")[0])
    return detect_language("\n".join(texts)[:_SAMPLE])


def detect_language(text: str) -> str:
    """Code of the language a text looks like, ``und`` without evidence."""
    if not text.isascii():
        found = _by_script(text)
        if found is not None:
            return found
    words = _LETTER.findall(text.casefold())
    if not words:
        return UNKNOWN
    scores = Counter(code for word in words for code in _SPOKEN_IN.get(word, ()))
    (best, score), (_, second) = (scores.most_common(2) + [(UNKNOWN, 0)] * 2)[:2]
    # Two common words, or one in a very short text; a tie is no evidence.
    enough = score >= 2 or (score == 1 and len(words) <= 6)
    return best if enough and score > second else UNKNOWN


def _by_script(text: str) -> str | None:
    letters = sum(map(str.isalpha, text)) or 1
    for code, pattern in _SCRIPTS:
        # Kana marks Japanese even where Han outnumber it; others must be a good part of the text.
        share = len(pattern.findall(text)) / letters
        if share > (0.05 if code == "ja" else 0.2):
            return code
    if len(_ARABIC.findall(text)) / letters > 0.2:
        return "fa" if _PERSIAN.search(text) else "ar"
    if len(_CYRILLIC.findall(text)) / letters > 0.2:
        return "uk" if _UKRAINIAN.search(text.casefold()) else "ru"
    return None
