"""Languages are told by declaration, script or common words; no evidence is no language."""

from __future__ import annotations

import pytest

from dspark.data.filters.language import UNKNOWN, language_of


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("How do I write a function that sorts a list of numbers?", "en"),
        ("Schreibe mir bitte ein Gedicht über die Berge und das Meer", "de"),
        ("Quelle est la capitale de la France et que peut-on y voir ?", "fr"),
        ("¿Cuál es la capital de España y qué se puede ver en ella?", "es"),
        ("Qual è la capitale della Francia e come si chiama il fiume?", "it"),
        ("Hoe kan ik een lijst met getallen sorteren in het Nederlands?", "nl"),
        ("请把这句话翻译成英文，并解释语法。", "zh"),
        ("この文章を英語に翻訳してください。", "ja"),
        ("이 문장을 영어로 번역해 주세요.", "ko"),
        ("Переведи это предложение на английский язык", "ru"),
        ("Переклади це речення англійською мовою, будь ласка, і поясни її", "uk"),
        ("ترجم هذه الجملة إلى الإنجليزية من فضلك", "ar"),
        ("لطفاً این جمله را به انگلیسی ترجمه کنید، چه می‌گوید؟", "fa"),
        ("इस वाक्य का अंग्रेज़ी में अनुवाद करें", "hi"),
        ("ช่วยแปลประโยคนี้เป็นภาษาอังกฤษ", "th"),
        ("12 + 30 = ?", UNKNOWN),
        ("x1 y2 z3 qqq", UNKNOWN),
    ],
)
def test_texts_are_told_apart(text, code):
    assert language_of([text], None) == code


def test_english_with_a_foreign_word_is_english():
    assert (
        language_of(["What does the word 漢字 mean and how is it written in Japanese?"], None)
        == "en"
    )


@pytest.mark.parametrize(
    ("declared", "code"),
    [
        ("English", "en"),
        ("eng", "en"),
        ("de-AT", "de"),
        ("pt_BR", "pt"),
        ("zsm", "zsm"),
        (" FR ", "fr"),
    ],
)
def test_what_is_declared_wins(declared, code):
    assert language_of(["この文章"], declared) == code
