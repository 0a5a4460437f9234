"""Length, refusal, language, self-consistency, contamination, and the run over all of them."""

import json

import pytest

from attar.collection.filters.contamination import item_hashes, overlaps
from attar.collection.filters.language import detect
from attar.collection.filters.row import answer_of, prompt_of, question_key
from attar.collection.filters.run import FILTERS, filter_rows
from attar.collection.filters.self_consistency import elected, final_answer
from attar.collection.filters.settings import FilterSettings
from attar.errors import DataError, SettingsError
from attar.options import flatten, nest


def chat(prompt, answer, system="", **fields):
    first = [{"role": "system", "content": system}] if system else []
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": [*first, *turns], **fields}


def test_parts_of_a_row():
    row = chat("Why?", "Because.", system="Be brief.")
    assert (prompt_of(row), answer_of(row)) == ("Why?", "Because.")
    assert question_key(row) == question_key(chat("Why?", "No reason.", system="Think."))
    assert question_key(row) != question_key(chat("Who?", "Because."))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert answer_of({"messages": [{"role": "assistant", "content": parts}]}) == "a\nb"
    assert answer_of({"messages": [{"role": "user", "content": "x"}]}) == ""
    assert (prompt_of({"prompt": "p", "completion": "c"}), answer_of({"text": "t"})) == ("p", "t")


def test_length():
    settings = FilterSettings(least_words=2, most_words=4)
    rows = [chat("q", text) for text in ("", "one", "one two", "a b c d", "a b c d e")]
    rows.append(chat("q", "one two", finish_reason="length"))
    assert FILTERS["length"](rows, settings) == [
        "empty",
        "fewer than 2 words",
        "",
        "",
        "more than 4 words",
        "cut off at the limit of tokens",
    ]
    assert FILTERS["length"](rows[-1:], FilterSettings(keep_cut=True)) == [""]


@pytest.mark.parametrize(
    "answer",
    [
        "I'm sorry, but I can\u2019t help with that.",
        "Sorry, I cannot  provide this.",
        "As an AI language model, I don't have opinions.",
        "Thanks for asking! Unfortunately, I cannot do it.",
        "很抱歉，我无法回答。",
    ],
)
def test_refusals(answer):
    assert FILTERS["refusal"]([chat("q", answer)], FilterSettings())[0].startswith("refuses: ")


@pytest.mark.parametrize(
    "answer",
    [
        "The clerk said that he was sorry and went on to help her.",
        "As an AI, I can do this: 2 + 2 = 4.",
        "A lathe. " * 40 + "I cannot help with that, said the smith.",
        "",
    ],
)
def test_what_is_no_refusal(answer):
    assert FILTERS["refusal"]([chat("q", answer)], FilterSettings()) == [""]


def test_phrases_of_a_file(tmp_path):
    file = tmp_path / "no.txt"
    file.write_text("Nej, tyvärr\n")
    settings = FilterSettings(refusals=str(file))
    rows = [chat("q", "Nej, tyvärr inte."), chat("q", "I can't help with that.")]
    assert FILTERS["refusal"](rows, settings) == ["refuses: 'nej, tyvärr'", ""]
    file.write_text("\n")
    with pytest.raises(DataError, match="has no phrase"):
        FILTERS["refusal"](rows, settings)


TEXTS = {
    "en": "The answer depends on how the water moves: when it is cold, the pipe will not carry as much.",
    "de": "Das Wasser ist im Winter kalt, und die Leitung kann nicht so viel davon tragen wie im Sommer.",
    "fr": "La réponse dépend de la façon dont les gens se servent de cette machine, qui est dans le jardin.",
    "es": "La respuesta depende de cómo se usa la máquina, que está en el jardín y no es muy grande.",
    "it": "La risposta dipende da come si usa la macchina che è nel giardino e non è molto grande.",
    "pt": "A resposta depende de como você usa a máquina, que não está no jardim e também é muito grande.",
    "nl": "Het antwoord hangt af van hoe de machine wordt gebruikt, en dat is niet altijd het beste.",
    "sv": "Svaret beror på hur maskinen används, och det är inte alltid som man kan se vad den har gjort.",
    "da": "Svaret afhænger af, hvordan maskinen bruges, og det er ikke altid at man ser hvad den blev.",
    "pl": "Odpowiedź zależy od tego, jak jest używana maszyna, która nie jest już w ogrodzie, ale w domu.",
    "ru": "Ответ зависит от того, как используется машина.",
    "uk": "Відповідь залежить від того, як її використовують, і від погоди.",
    "zh": "这个问题的答案取决于机器的使用方式。",
    "ja": "この問題の答えは機械の使い方によります。",
    "ko": "이 질문의 답은 기계를 어떻게 쓰는지에 달려 있습니다.",
    "ar": "تعتمد الإجابة على كيفية استخدام الآلة.",
    "fa": "پاسخ به این بستگی دارد که چگونه از دستگاه استفاده شود.",
    "el": "Η απάντηση εξαρτάται από τη χρήση της μηχανής.",
    "hi": "इस प्रश्न का उत्तर मशीन के उपयोग पर निर्भर करता है।",
}


@pytest.mark.parametrize("code", TEXTS)
def test_languages(code):
    assert detect(TEXTS[code]) == code


def test_languages_that_cannot_be_told():
    code = "```python\nfor the in of and to: print(is that)\n```\n"
    for text in ("", "42", "x = f(y)", "Paris", code, "Zq vrt plm kjh wsx edc rfv tgb"):
        assert detect(text) is None
    assert detect(code + TEXTS["de"]) == "de"
    rows = [chat("q", text) for text in (TEXTS["de"], TEXTS["en"], "42")]
    assert FILTERS["language"](rows, FilterSettings(language="en,fr")) == ["language de", "", ""]
    with pytest.raises(SettingsError, match="language is 'tlh'"):
        FILTERS["language"](rows, FilterSettings(language="tlh"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"Then $x = \frac{1}{2}$, so \boxed{\frac{1}{2}}.", "frac 1 2"),
        ("3 + 4 = 7, of which 2 stay.\n#### 1,234.50", "1234.5"),
        ("First 8, then 9. The answer is 18 apples.", "18"),
        ("The final answer is: **(B)**", "b"),
        ("Answer: B. Oxygen", "b"),
        ("So he has $5.00 left", "5"),
        ("We compare.\nYes, it does.", "yes it does"),
        ("", ""),
    ],
)
def test_final_answers(text, answer):
    assert final_answer(text) == answer


def test_votes():
    assert elected(["a", "b", "a"], 0.5) == "a"
    assert elected(["a", "b", "a"], 0.7) is None
    assert elected(["a", "b"], 0.1) is None
    assert elected(["a"], 1.0) == "a"


def test_self_consistency_keeps_the_samples_that_agree():
    answers = ["#### 4", "so it is 4", "#### 5", "The answer is 4.", "#### 9"]
    rows = [chat("2+2", answer) for answer in answers] + [
        chat("3+3", "6"),
        chat("3+3", "7"),
        chat("1+1", "2"),
    ]
    reasons = FILTERS["self_consistency"](rows, FilterSettings(agreement=0.5))
    assert [bool(reason) for reason in reasons] == [False, False, True, False, True, True, True, False]


def test_contamination_by_brute_force(tmp_path):
    file = tmp_path / "test.jsonl"
    question = "how many litres of cold water does the old pump in the garden lift in an hour"
    short = "who wrote the second of the letters"
    rows = [{"q": question, "choices": ["one", "two"]}, {"q": short, "choices": []}, {"q": "too short"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = FilterSettings(evaluation=(str(file),))
    table = item_hashes([question, short, "too short"], 13)
    assert sorted(table) == [7, 13]
    words = question.split()
    for start in range(len(words)):
        for stop in range(start + 1, len(words) + 1):
            piece = ["he", "asked", *words[start:stop], "please"]
            assert overlaps(piece, table) == (stop - start >= 13)
    reason = "shares a run of words with test.jsonl"
    cases = {
        f"Say: {question.upper()}?": reason,
        f"{short}!": reason,
        "who wrote the second of the books": "",
        "too short": "",
    }
    got = FILTERS["contamination"]([chat(prompt, "yes") for prompt in cases], settings)
    assert got == list(cases.values())
    assert FILTERS["contamination"]([chat("q", question)], settings) == [reason]
    assert FILTERS["contamination"]([chat("q", "a", system=question)], settings) == [""]


def test_a_form_of_words_is_no_contamination():
    form = "answer the following question with one of the letters a b c or d please"
    items = [f"{form} {n} {n + 1} {n + 2}" for n in range(12)]
    table = item_hashes(items, 13)
    assert not overlaps([*form.split(), "now"], table)
    assert overlaps(items[3].split(), table)


def test_evaluations_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        FILTERS["contamination"]([chat("q", "a")], FilterSettings(evaluation=("no/such.jsonl",)))
    file = tmp_path / "e.txt"
    file.write_text("one two\n")
    with pytest.raises(DataError, match="no item of 6 words"):
        FILTERS["contamination"]([chat("q", "a")], FilterSettings(evaluation=(str(file),)))


def test_the_summary_says_what_went_and_why(tmp_path):
    rows = [
        chat("What is 2 + 2?", "It is 4, of course.", id="a"),
        chat("What is 2 + 2?", "It is 4, of course.", id="b"),
        chat("What is 3 + 3?", "I'm sorry, but I can't help with that.", id="c"),
        chat("What is 5 + 5?", "", id="d"),
        chat("What is 6 + 6?", "", id="e"),
    ]
    kept, summary = filter_rows(rows, FilterSettings())
    assert [row["id"] for row in kept] == ["a"]
    assert summary.rows == 5 and summary.kept == 1
    assert [(item.filter, item.count) for item in summary.dropped] == [
        ("length", 2),
        ("refusal", 1),
        ("near_duplicates", 1),
    ]
    assert [example["id"] for example in summary.dropped[0].examples] == ["d", "e"]
    assert json.loads(json.dumps(summary.to_dict()))["dropped"][1]["examples"][0]["id"] == "c"
    table = summary.table()
    assert table.startswith("1 of 5 rows kept (length, refusal, near_duplicates)")
    assert "I'm sorry, but I can't help" in table
    assert filter_rows(rows, FilterSettings(filters="none"))[0] == rows


def test_which_filters_run():
    assert FilterSettings().names == ("length", "refusal", "near_duplicates")
    given = FilterSettings(language="en", evaluation=("x",), agreement=0.5)
    assert given.names == tuple(FILTERS)
    assert FilterSettings(filters="near-duplicates, length").names == ("length", "near_duplicates")
    assert nest(FilterSettings, flatten(given)) == given


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("filters", {"filters": "length,nonsense"}),
        ("language", {"filters": "language"}),
        ("evaluation", {"filters": "contamination"}),
        ("language", {"language": "English"}),
        ("similarity", {"similarity": 0.0}),
        ("agreement", {"agreement": 2.0}),
        ("most_words", {"most_words": 3, "least_words": 5}),
        ("evaluation_run", {"evaluation_run": 0}),
    ],
)
def test_wrong_settings(field, options):
    with pytest.raises(SettingsError) as error:
        FilterSettings(**options)
    assert error.value.field == field
