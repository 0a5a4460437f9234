"""Which tokens of a conversation are predicted, against references that write the templates by hand."""

import json

import pytest
import torch

from attar.data.answers import answer_spans, dialogues, has_conversations, pack_answers, tokenized
from attar.data.packing import PADDING, render
from attar.data.sources import MessageList, read_split
from attar.errors import DataError
from attar.models.loading.plain_tokenizer import PlainTokenizer
from tests import tiny_models

SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<bos>"]  # fmt: skip

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA3 = (
    "{{ '<s>' }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = """{{ '<s>' }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}
{%- set chat = messages[1:] %}{% else %}{% set system = '' %}{% set chat = messages %}{% endif %}
{%- for m in chat %}
{%- if m.role != (['user', 'assistant'])[loop.index0 % 2] %}{{ raise_exception('alternate') }}{% endif %}
{%- if m.role == 'user' %}
{%- if loop.last or loop.index0 + 2 == chat | length and chat[-1].role == 'assistant' %}
{{- '[INST] ' + system + m.content + '[/INST]' }}{% else %}{{- '[INST] ' + m.content + '[/INST]' }}{% endif %}
{%- else %}{{- ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}"""
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
FORGETS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip() }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
GENERATION = """{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant
    {%- generation -%}
        {{ '\n' + m.content }}<|im_end|>
    {% endgeneration %}{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LABELS = """{% for m in messages %}{{ m.role | upper }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""


def chatml(messages):
    for message in messages:
        mine = message["role"] == "assistant"
        yield f"<|im_start|>{message['role']}\n", False
        yield f"{message['content']}<|im_end|>", mine
        yield "\n", False


def llama3(messages):
    yield "<s>", False
    for message in messages:
        yield f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False
        yield f"{message['content'].strip()}<|eot_id|>", message["role"] == "assistant"


def mistral(messages):
    system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    chat = [message for message in messages if message["role"] != "system"]
    last = max(number for number, message in enumerate(chat) if message["role"] == "user")
    yield "<s>", False
    for number, message in enumerate(chat):
        if message["role"] == "user":
            yield f"[INST] {system if number == last else ''}{message['content']}[/INST]", False
        else:
            # the prefix with the system prompt is none of the whole: the blank seems to be the template's
            alone = bool(system) and number < len(chat) - 1
            yield " ", not alone
            yield f"{message['content']}</s>", True


def gemma(messages):
    yield "<bos>", False
    for message in messages:
        mine = message["role"] == "assistant"
        yield f"<start_of_turn>{'model' if mine else message['role']}\n", False
        yield f"{message['content'].strip()}<end_of_turn>", mine
        yield "\n", False


def forgets(messages):
    for number, message in enumerate(messages):
        mine = message["role"] == "assistant"
        content = message["content"]
        if mine and number < len(messages) - 1:
            content = content.split("</think>")[-1].lstrip()
        yield f"<|im_start|>{message['role']}\n", False
        yield f"{content}<|im_end|>", mine
        yield "\n", False


def generation(messages):
    for message in messages:
        if message["role"] == "assistant":
            yield "<|im_start|>assistant", False
            yield f"\n{message['content']}<|im_end|>\n", True
        else:
            yield f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n", False


def labels(messages):
    for message in messages:
        yield f"{message['role'].upper()}:", False
        yield f" {message['content']}\n", message["role"] == "assistant"


TEMPLATES = {
    "chatml": (CHATML, chatml),
    "llama3": (LLAMA3, llama3),
    "mistral": (MISTRAL, mistral),
    "gemma": (GEMMA, gemma),
    "forgets": (FORGETS, forgets),
    "generation": (GENERATION, generation),
    "labels": (LABELS, labels),
}

CHATS = {
    "one turn": [("user", "What is a list?"), ("assistant", "A row of things.")],
    "turns": [("user", "Hi"), ("assistant", "Hi"), ("user", "Hi"), ("assistant", "Hi, and bye")],
    "system": [("system", "Be kind."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
    "blanks": [("user", "  x "), ("assistant", "  y\n\n"), ("user", "z"), ("assistant", " w ")],
    "reasons": [
        ("user", "2+2"),
        ("assistant", "<think>\nfour\n</think>\n\n4"),
        ("user", "3+3"),
        ("assistant", "<think>\nsix\n</think>\n\n6"),
    ],
    "letters": [("user", "Grüße 🌍?"), ("assistant", "你好 🌍 — naïve αβ 1 β")],
    "asks last": [("user", "a"), ("assistant", "b"), ("user", "c")],
    "repeats": [("user", "b"), ("assistant", "b"), ("user", "b"), ("assistant", "b")],
}


@pytest.fixture(scope="module")
def plain():
    tokenizer = tiny_models.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


@pytest.fixture
def tokenizer_with(plain):
    def with_template(template):
        plain.chat_template = template
        return plain

    return with_template


def conversation(chat):
    return MessageList([{"role": role, "content": content} for role, content in chat], "data.jsonl:1")


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_by_characters(tokenizer_with, name, chat):
    template, reference = TEMPLATES[name]
    messages = conversation(CHATS[chat])
    if name == "gemma" and chat == "system":
        messages = MessageList(messages[1:], "data.jsonl:1")
    tokenizer = tokenizer_with(template)
    pieces = list(reference(messages))
    text = render(messages, tokenizer)
    assert text == "".join(piece for piece, _ in pieces)
    wanted = [mine for piece, mine in pieces for _ in piece]
    spans = answer_spans(messages, text, tokenizer)
    actual = [any(start <= at < stop for start, stop in spans) for at in range(len(text))]
    assert actual == wanted, (text, [text[start:stop] for start, stop in spans])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_token_is_predicted_if_a_character_of_it_is(tokenizer_with, name):
    template, reference = TEMPLATES[name]
    tokenizer = tokenizer_with(template)
    for chat in ("turns", "letters", "one turn"):
        messages = conversation(CHATS[chat])
        pieces = list(reference(messages))
        text = "".join(piece for piece, _ in pieces)
        wanted = [mine for piece, mine in pieces for _ in piece]
        ids, predicted = tokenized(text, answer_spans(messages, text, tokenizer), tokenizer)
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert predicted == [any(wanted[start:stop]) for start, stop in encoding["offset_mapping"]]


def test_a_tokenizer_without_offsets_is_cut_at_the_answers(tokenizer_with):
    class Slow:
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, *args, **options):
            return self.inner(*args, **options)

    tokenizer = tokenizer_with(CHATML)
    text = "<|im_start|>assistant\nA row.<|im_end|>\n"
    span = (text.index("A"), text.index("\n", 30))
    assert tokenized(text, [span], Slow(tokenizer)) == tokenized(text, [span], tokenizer)


def test_the_plain_tokenizer_marks_generation_blocks_too(tokenizer_with, plain):
    tokenizer = tokenizer_with(GENERATION)
    ours = PlainTokenizer(plain.backend_tokenizer, {"eos_token": "<|endoftext|>"}, GENERATION)
    messages = conversation(CHATS["turns"])
    text = render(messages, tokenizer)
    assert render(messages, ours) == text
    assert answer_spans(messages, text, ours) == answer_spans(messages, text, tokenizer)


def test_prompts_and_completions(tokenizer_with, tmp_path):
    tokenizer = tokenizer_with(CHATML)
    file = tmp_path / "pairs.jsonl"
    first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [
        {"prompt": "2 + 2 =", "completion": " 4"},
        {
            "prompt": [*first, {"role": "user", "content": "c"}],
            "completion": [{"role": "assistant", "content": "d"}],
        },
        {"prompt": "x", "completion": "  "},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    documents = read_split(f"whole:{file}", "train").documents
    assert sorted(map(str, (text_of(item, tokenizer) for item in documents))) == sorted(
        ["d<|im_end|>", " 4<|endoftext|>"]
    )
    assert {render(item, tokenizer)[:7] for item in documents} == {"2 + 2 =", "<|im_st"}
    for wrong in ({"prompt": "x", "completion": []}, {"prompt": 3, "completion": "x"}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(DataError, match=r"pairs.jsonl:1: (prompt|completion) is no"):
            read_split(f"whole:{file}", "train")


def text_of(document, tokenizer):
    """The predicted tokens of a document as text."""
    (part,) = dialogues([document], tokenizer)
    return tokenizer.decode([token for token, mine in zip(part.tokens, part.predicted, strict=True) if mine])


def test_without_a_template_an_answer_continues_its_prompt(plain):
    plain.chat_template = None
    messages = conversation([("user", "2 + 2 ="), ("assistant", " 4")])
    assert text_of(messages, plain) == " 4<|endoftext|>"


def test_a_plain_text_is_predicted_whole_with_its_end(tokenizer_with):
    tokenizer = tokenizer_with(CHATML)
    assert text_of("A text.", tokenizer) == "A text.<|endoftext|>"


@pytest.fixture
def data(tmp_path):
    def write(*chats):
        file = tmp_path / "chats.jsonl"
        rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return f"whole:{file}"

    return write


def turns(number, words=3):
    return [("user", f"question {number}"), ("assistant", " ".join(f"answer{number}" for _ in range(words)))]


def rows_of(tokenizer, data, **options):
    settings = {"length": 64, "rows": None, "seed": 0, "packing": "separate", **options}
    return pack_answers(tokenizer, data, "train", **settings)


@pytest.mark.parametrize("packing", ["separate", "stream"])
def test_rows_hold_whole_conversations_and_targets_are_the_next_tokens(tokenizer_with, data, packing):
    tokenizer = tokenizer_with(CHATML)
    source = data(*[turns(number, 2 + number % 5) for number in range(30)])
    result = rows_of(tokenizer, source, packing=packing, length=150)
    examples = result.examples
    assert (result.documents, result.cut, result.dropped) == (30, 0, 0)
    assert len(examples) == 30 if packing == "separate" else 5 <= len(examples) < 20
    predicted = examples.targets != PADDING
    following = torch.roll(examples.tokens, -1, 1)
    assert torch.equal(examples.targets[predicted], following[predicted])
    answers = sorted(tokenizer.decode(examples.targets[predicted].tolist()).split("<|im_end|>"))
    wanted = sorted([*(turns(number, 2 + number % 5)[1][1] for number in range(30)), ""])
    assert answers == wanted
    texts = "".join(tokenizer.decode(row[row != PADDING].tolist()) for row in examples.tokens)
    assert texts.count("<|im_start|>user") == 30


def test_a_conversation_is_cut_or_dropped_and_counted(tokenizer_with, data):
    tokenizer = tokenizer_with(CHATML)
    long_answer, long_prompt = turns(1, 200), [("user", "why " * 200), ("assistant", "so")]
    result = rows_of(tokenizer, data(turns(0), long_answer, long_prompt, [("user", "a")]))
    assert (result.documents, result.cut, result.dropped, len(result.examples)) == (4, 1, 2, 2)
    assert all((row != PADDING).any() for row in result.examples.targets)
    with pytest.raises(DataError, match="no answer of the train split fits into 64 tokens"):
        rows_of(tokenizer, data(long_prompt))


def test_rows_are_as_many_as_are_wanted(tokenizer_with, data):
    tokenizer = tokenizer_with(CHATML)
    source = data(*[turns(number) for number in range(20)])
    assert len(rows_of(tokenizer, source, rows=7).examples) == 7
    shuffled = [rows_of(tokenizer, source, seed=seed).examples.tokens for seed in (0, 0, 1)]
    assert torch.equal(shuffled[0], shuffled[1])
    assert not torch.equal(shuffled[0], shuffled[2])


def test_a_row_has_one_beginning(tokenizer_with, data, monkeypatch):
    tokenizer = tokenizer_with(LLAMA3)
    begin = tokenizer.convert_tokens_to_ids("<s>")
    monkeypatch.setattr("attar.data.answers.front_tokens", lambda tokenizer, bos: [begin])
    examples = rows_of(tokenizer, data(*[turns(n) for n in range(8)]), packing="stream", length=128).examples
    assert ((examples.tokens == begin).sum(1) == 1).all()
    assert (examples.tokens[:, 0] == begin).all()


def test_which_sources_hold_conversations(data, tmp_path):
    assert has_conversations(data(turns(1), turns(2)))
    file = tmp_path / "text.txt"
    file.write_text("words " * 500)
    assert not has_conversations(str(file))


def test_an_empty_answer_and_a_refusing_template(tokenizer_with):
    tokenizer = tokenizer_with(CHATML)
    empty = conversation([("user", "a"), ("assistant", "")])
    assert text_of(empty, tokenizer) == "<|im_end|>"
    with pytest.raises(DataError, match=r"data\.jsonl:1: the model's chat template refuses"):
        text_of(conversation([("assistant", "a"), ("user", "b")]), tokenizer_with(MISTRAL))
