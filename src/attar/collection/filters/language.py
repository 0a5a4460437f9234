"""Answers in another language than the ones that are wanted: a detector by scripts and frequent words.

    script     most letters decide: Greek, Hebrew, Thai, Hangul, ... belong to one language here; kana makes
               Japanese of Han characters, letters of its own make Ukrainian of Cyrillic, Persian of Arabic
    words      for Latin letters: each of :data:`FREQUENT`'s words counts for its languages, a word that k of
               them share for 1/k in each. The best language needs two points and 1.5 times the second's

What it can: tell the languages below apart in running prose of about ten words and more. What it cannot:
short answers, languages that are not in the tables, closely related ones (Norwegian and Danish are one entry,
Indonesian and Malay too), mixed texts, code. Then it says nothing, and the row is kept. Text in code fences
does not count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

from attar.collection.filters.row import CollectedRow, answer_of
from attar.collection.filters.settings import FilterSettings
from attar.data.words import words
from attar.errors import SettingsError

POINTS, MARGIN = 2.0, 1.5  # of the best language; times the second's points
READ = 20_000  # characters of an answer that are looked at

FREQUENT = {
    "en": "the of and to in is that for it was on are with as his they be at this have from or had by "
    "not but what were we when your can there which their if will how would",
    "de": "der die und das ist nicht von ein eine mit den zu sich auf für dem des auch als wie im "
    "werden sind oder wird bei nach einen durch kann noch aber nur über wenn",
    "fr": "le la les et des est une dans que pour qui sur avec par pas plus au sont ce cette du ne se "
    "mais ou comme nous vous être ces leur aux il elle on",
    "es": "el la los las y de que en un una por con para es del se no más como su al lo pero sus son "
    "está este entre cuando muy también hay fue ha ser",
    "it": "il la che di e un una per non sono con del della le gli si come più anche nel alla dei ma "
    "questo è da al delle ha essere lo se questa",
    "pt": "o a os as que de não um uma para com do da em por se mais como mas ao dos das foi ele são "
    "pelo também é você isso pode ser na no está",
    "nl": "de het een en van is dat niet op te zijn met voor die er aan ook als bij maar om uit dan nog "
    "wordt naar heeft kan worden deze hebben ik je",
    "sv": "och att det som en är på av för med den till inte har de ett om men var sig från vi så kan "
    "när eller ska också efter han hon detta",
    "da": "og at det som en er på af for med den til ikke har de et om men var sig fra vi så kan når "
    "eller skal også efter han hun dette være blev",
    "fi": "ja on ei että se oli hän mutta kun ovat myös kuin niin sen tai joka ole voi hänen tämä mitä "
    "vain jos sekä olla mukaan kanssa nyt",
    "pl": "i w na z do nie się jest że to jak o ale po co tak za od przez dla są może tym który być czy "
    "oraz jego przed tylko ich",
    "cs": "a se v na je že s z do to o i jako za by ale které jsou pro od po tak jeho podle nebo když "
    "který byl také může aby",
    "hu": "a az és hogy nem egy is ez volt csak de meg mint már még ha van vagy el azt mert kell lehet "
    "amely után nagyon minden",
    "ro": "și în de la a cu nu pe că o care este din un mai pentru se sunt ca au fi sau prin dar ce "
    "după fost această acest",
    "tr": "ve bir bu için ile da de çok olarak daha olan gibi ne kadar değil var sonra her ama en ya "
    "olduğu o mi ise veya tarafından",
    "id": "yang dan di dengan untuk ini itu dari dalam tidak pada adalah akan ada oleh juga sebagai ke "
    "atau dapat karena telah mereka bisa saya anda",
    "vi": "là của và có không được một cho các với trong này những người khi đã để từ đến như cũng về "
    "ra nhiều tôi bạn",
}

_SCRIPTS = (
    ("ja", "\u3040-\u30ff"),
    ("zh", "\u3400-\u4dbf\u4e00-\u9fff"),
    ("ko", "\uac00-\ud7af\u1100-\u11ff"),
    ("ru", "\u0400-\u04ff"),
    ("ar", "\u0600-\u06ff"),
    ("el", "\u0370-\u03ff"),
    ("he", "\u0590-\u05ff"),
    ("hi", "\u0900-\u097f"),
    ("bn", "\u0980-\u09ff"),
    ("ta", "\u0b80-\u0bff"),
    ("te", "\u0c00-\u0c7f"),
    ("th", "\u0e00-\u0e7f"),
    ("ka", "\u10a0-\u10ff"),
    ("hy", "\u0530-\u058f"),
    ("latin", "A-Za-z\u00c0-\u024f\u1e00-\u1eff"),
)
_OWN_LETTERS = {"ru": ("uk", "іїєґІЇЄҐ"), "ar": ("fa", "پچژگک")}

KNOWN = (*FREQUENT, *(name for name, _ in _SCRIPTS if name != "latin"), "uk", "fa")


def language(rows: Sequence[CollectedRow], settings: FilterSettings) -> list[str]:
    """Reasons against rows; "" keeps one, also where the language cannot be told.

    Raises:
        SettingsError: a wanted language is not in the tables.
    """
    wanted = settings.language.split(",")
    if missing := [code for code in wanted if code not in KNOWN]:
        raise SettingsError("language", missing[0], f"of {', '.join(sorted(KNOWN))}")
    codes = [detect(answer_of(row)) for row in rows]
    return ["" if code is None or code in wanted else f"language {code}" for code in codes]


def detect(text: str) -> str | None:
    """The language of a text, a code of :data:`KNOWN`; None where it cannot be told."""
    prose = re.sub(r"```.*?(```|$)", " ", text[:READ], flags=re.DOTALL)
    script = _script(prose)
    return _by_words(prose) if script == "latin" else script


def _script(text: str) -> str | None:
    """The script, or the language of a script that belongs to one, of most letters."""
    counts = Counter({name: len(re.findall(f"[{letters}]", text)) for name, letters in _SCRIPTS})
    total = counts.total()
    if counts["ja"] * 10 >= counts["zh"] and counts["ja"] + counts["zh"] > total / 2:
        return "ja"
    name, count = counts.most_common(1)[0]
    if count * 2 <= total or (name != "latin" and count < 2):
        return None
    other, letters = _OWN_LETTERS.get(name, ("", ""))
    script_letters = sum(text.count(letter) for letter in letters)
    return other if script_letters * 50 > count else name


def _by_words(text: str) -> str | None:
    points: Counter[str] = Counter()
    for word, count in Counter(words(text)).items():
        for code in _languages_of().get(word, ()):
            points[code] += count / len(_languages_of()[word])  # type: ignore[assignment]
    best, second = [*points.most_common(2), ("", 0), ("", 0)][:2]
    return best[0] if best[1] >= max(POINTS, MARGIN * second[1]) else None


@cache
def _languages_of() -> dict[str, tuple[str, ...]]:
    """Each frequent word, and the languages that have it."""
    table: dict[str, tuple[str, ...]] = {}
    for code, listed in FREQUENT.items():
        for word in listed.split():
            table[word] = (*table.get(word, ()), code)
    return table
