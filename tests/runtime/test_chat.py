"""Rows of messages and special tokens in instructions, against transformers' own rendering."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from prepare import pipeline
from prepare.chat import ChatTemplate
from prepare_data import main
from runtime.shards import LOSS_MASK_BIT, read_index, write_index
from runtime.tokenizer import load_tokenizer
from tests.conftest import asked
from tests.helpers.text_files import BEGINS, write_rows, write_sentencepiece, write_tokenizer

PAIRS = [{"prompt": f"<|turn|>{n}", "response": f"yes {n}"} for n in range(20)]
SPECIAL = ["<|turn|>", "<|over|>"]
PLAIN = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message.role }}\n"
    "{{ message.content | trim }}<|over|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
MARKED = (
    "{{- bos_token }}{%- for message in messages %}\n    {%- if message.role == 'assistant'"
    " %}<|turn|>assistant\n{% generation %}{{ message.content }}<|over|>{% endgeneration %}\n   "
    " {%- else %}{{- '<|turn|>' + message.role + ':' + message.content + '<|over|>' }}{%- endif"
    " %}\n{%- endfor %}{%- if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
# As SentencePiece's kind has it, with the end token of the tokenizer, tools as JSON and loop
# controls.
BRACKETS = (
    "{{ bos_token }}{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}{% for message in"
    " messages %}{% if message.role == 'system' %}{% continue %}{% endif %}{% if message.role =="
    " 'assistant' %} {{ message.content }}{{ eos_token }}{% else %}[INST] {{ message.content }}"
    " [/INST]{% endif %}{% endfor %}"
)
TURNS = [
    [("user", "what is 12?"), ("assistant", "naïve 日本 0.5")],
    [
        ("system", "be short"),
        ("user", " hello \n"),
        ("assistant", "the\n\nend"),
        ("user", "<|over|> x = 1"),
        ("assistant", "def f():\n\treturn 0.5"),
    ],
    [("user", "a 🙂"), ("assistant", "1"), ("assistant", "2 & <b>"), ("user", "not answered")],
]
CONVERSATIONS = [[{"role": role, "content": content} for role, content in turns] for turns in TURNS]


def make_folder(folder: Path, template: str, kind: str = "byte level", **roles: object):
    roles = {"chat_template": template} | roles
    if kind == "sentencepiece":
        return write_sentencepiece(folder, **roles)
    roles = {"bos_token": "<|begin|>", "eos_token": "<|end|>"} | roles
    write_tokenizer(folder, roles, post_processor=BEGINS)
    rules = json.loads((folder / "tokenizer.json").read_text())
    first = len(rules["model"]["vocab"])
    for i, content in enumerate(SPECIAL):
        rules["added_tokens"].append(
            {**rules["added_tokens"][0], "id": first + i, "content": content}
        )
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    return folder


def id_of(folder: Path, content):
    return Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(content)


def prepare(tmp_path: Path, rows: list[dict], folder: Path, *words: object, code: int = 0):
    path = tmp_path / "chat.jsonl"
    if rows:  # else those that are there
        write_rows(path, rows)
    words = [
        "local",
        str(path),
        "name=chat",
        "instruct=true",
        f"tokenizer={folder}",
        f"out={tmp_path / 'data'}",
        "val_share=0.3",
        "processes=1",
        *words,
    ]
    assert main(words) == code


def read_documents(folder: Path, eot=LOSS_MASK_BIT | 1):
    """(ids, whether each is learned) of every document of both splits, without its end-of-text
    token `eot`."""
    documents = []
    for split in ("train", "val"):
        values = np.fromfile(folder / f"{split}_00000.bin", "<u4")
        for part in np.split(values, np.flatnonzero(values == eot))[1:]:
            documents.append(
                ((part[1:] & ~LOSS_MASK_BIT).tolist(), (part[1:] < LOSS_MASK_BIT).tolist())
            )
    return documents


def spread(rows: list[list[dict]]):
    """Rows enough for both splits, all different."""
    other_rows = [
        [{"role": "user", "content": str(n)}, {"role": "assistant", "content": f"say {n}"}]
        for n in range(12)
    ]
    return [*rows, *other_rows]


def marked_ids(transformers_own, messages: list[dict]):
    """Ids, and whether each is learned, by transformers' own mask."""
    made = transformers_own.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    return made["input_ids"], [bool(i) for i in made["assistant_masks"]]


def ids_by_prefixes(transformers_own, messages: list[dict]):
    """Ids, and whether each is learned: what an answer adds to the messages before it."""
    ids = transformers_own.apply_chat_template(messages)["input_ids"]
    is_learned = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if i:
            shorter = transformers_own.apply_chat_template(messages[:i], add_generation_prompt=True)
            context = shorter["input_ids"]
        else:
            context = [0, *transformers_own.encode("<|turn|>assistant\n", add_special_tokens=False)]
        end = len(transformers_own.apply_chat_template(messages[: i + 1])["input_ids"])
        assert ids[: len(context)] == context
        is_learned[len(context) : end] = [True] * (end - len(context))
    return ids, is_learned


@pytest.mark.parametrize(
    "template, ids_of",
    [(PLAIN, ids_by_prefixes), (MARKED, marked_ids)],
    ids=["by prefixes", "marked"],
)
def test_of_a_conversation_the_answers_alone_are_learned(
    tmp_path: Path, template: str, ids_of: Callable[..., Any]
):
    """Its ids are those of transformers."""
    folder = make_folder(tmp_path / "tokenizer", template)
    rows = spread(CONVERSATIONS)
    prepare(tmp_path, [{"messages": messages} for messages in rows], folder)
    transformers_own = AutoTokenizer.from_pretrained(folder)
    expected = [ids_of(transformers_own, messages) for messages in rows]
    assert sorted(read_documents(tmp_path / "data/chat")) == sorted(expected)


def test_the_index_of_conversations_names_their_template(tmp_path: Path):
    folder = make_folder(tmp_path / "tokenizer", PLAIN)
    rows = [{"messages": messages} for messages in spread(CONVERSATIONS)]
    prepare(tmp_path, rows, folder)
    index = read_index(tmp_path / "data/chat")
    assert index.is_masked and index.selection["instruct"] == ["messages"]
    assert index.selection["chat_template_sha256"] == ChatTemplate(str(folder)).sha256


@pytest.mark.parametrize(
    "template, kind", [(PLAIN, "byte level"), (MARKED, "byte level"), (BRACKETS, "sentencepiece")]
)
@pytest.mark.parametrize("extra", [{}, {"tools": [{"name": "f", "é": "<&>"}]}])
def test_the_text_of_a_conversation_is_transformers_own(
    tmp_path: Path, template: str, kind: str, extra: dict[str, list[dict]]
):
    folder = make_folder(tmp_path, template, kind)
    transformers_own = AutoTokenizer.from_pretrained(folder)
    for messages in CONVERSATIONS:
        chat = ChatTemplate(str(folder)).render({"messages": messages, **extra})
        assert chat.text == transformers_own.apply_chat_template(messages, tokenize=False, **extra)
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        assert len(chat.spans) == len(answers)
        for answer, (first, last) in zip(answers, chat.spans, strict=True):
            end = "</s>" if kind == "sentencepiece" else "<|over|>"
            assert chat.text[first:last].strip() == answer + end


def test_templates_by_file_and_by_name_are_those_of_transformers(
    tmp_path: Path,
):
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": BRACKETS}]
    folder = make_folder(tmp_path, named)
    transformers_own, ours = AutoTokenizer.from_pretrained(folder), ChatTemplate(str(folder))
    for extra in {}, {"tools": [{"name": "f"}]}:
        text = ours.render({"messages": CONVERSATIONS[0], **extra}).text
        assert text == transformers_own.apply_chat_template(
            CONVERSATIONS[0], tokenize=False, **extra
        )
    (folder / "chat_template.jinja").write_text(MARKED)
    text = ChatTemplate(str(folder)).render({"messages": CONVERSATIONS[0]}).text
    assert text == AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CONVERSATIONS[0], tokenize=False
    )


# Writes an answer another way once a question follows it, as templates do that drop old reasoning.
FORGETS = PLAIN.replace(
    "{{ message.content | trim }}", "{% if loop.last %}think{% endif %}{{ message.content }}"
)
ALWAYS_BEGINS = PLAIN.replace("{% if add_generation_prompt %}", "").replace(
    "assistant\n{% endif %}", "assistant\n"
)


@pytest.mark.parametrize(
    "template, messages, words",
    [
        (
            FORGETS,
            CONVERSATIONS[1],
            "writes message 3 of a conversation another way once messages follow it",
        ),
        (
            ALWAYS_BEGINS,
            CONVERSATIONS[0],
            "writes the beginning of an answer behind every conversation",
        ),
        (
            "{{ raise_exception('no system') }}",
            CONVERSATIONS[0],
            "refuses a conversation (no system)",
        ),
        ("{{ messages.append(1) }}", CONVERSATIONS[0], "refuses a conversation"),
        ("{{ strftime_now('%d') }}", CONVERSATIONS[0], "'strftime_now' is undefined"),
        ("{% for %}", CONVERSATIONS[0], "is no Jinja"),
        (None, CONVERSATIONS[0], "has no chat template"),
        (PLAIN, "hello", "messages is str: give a list"),
        (PLAIN, [], "messages is empty"),
        (PLAIN, ["hello"], 'a message is "hello"'),
    ],
)
def test_what_cannot_be_learned_from_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str | None, messages, words: str
):
    folder = make_folder(tmp_path / "tokenizer", template)
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": messages}])
    output = asked(
        capsys,
        main,
        "local",
        path,
        "name=chat",
        "instruct=true",
        f"tokenizer={folder}",
        f"out={tmp_path / 'data'}",
        "processes=1",
        code=2,
    )
    assert words in output and "Traceback" not in output


def test_messages_need_a_folders_tokenizer_and_one_kind_of_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [{"messages": CONVERSATIONS[0]}, {"prompt": "a", "response": "b"}]
    prepare(tmp_path, rows, "gpt2", code=2)
    assert "need a tokenizer with a chat template, which gpt2 has not" in capsys.readouterr().err
    prepare(tmp_path, rows, make_folder(tmp_path / "tokenizer", PLAIN), code=2)
    assert "chat.jsonl:2 has no column 'messages'" in capsys.readouterr().err


# ------------------------------------------------------------------------------ spelled tokens


@pytest.mark.parametrize("name", ["folder", "gpt2", "byte"])
def test_special_tokens_spelled_in_instructions_are_those_tokens(tmp_path: Path, name: str):
    folder = make_folder(tmp_path / "tokenizer", PLAIN) if name == "folder" else name
    tokenizer = load_tokenizer(str(folder))
    word, number = (
        ("<|turn|>", id_of(folder, "<|turn|>"))
        if name == "folder"
        else ("<|endoftext|>", tokenizer.eot)
    )
    rows = [{"prompt": f"{word}user {n}", "response": f"yes {n}{word}"} for n in range(20)]
    prepare(tmp_path, rows, folder)
    index = read_index(tmp_path / "data/chat")
    ids = (
        np.concatenate([np.fromfile(shard.path, "<u4") for shard in index.shards]) & ~LOSS_MASK_BIT
    )
    before_documents = 0 if name == "folder" else len(rows)  # by the end-of-text token itself
    assert (ids == number).sum() == 2 * len(rows) + before_documents
    assert tokenizer.encode_special(f"a{word}").tolist() == [*tokenizer.encode("a"), number]
    assert index.selection["special_tokens"] == "parsed"


def test_plain_text_keeps_special_tokens_as_text(tmp_path: Path):
    folder = make_folder(tmp_path / "tokenizer", PLAIN)
    texts = [f"<|turn|> {n} <|endoftext|>" for n in range(30)]
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    assert (
        main(
            [
                "local",
                str(path),
                "name=a",
                f"tokenizer={folder}",
                f"out={tmp_path}",
                "val_share=0.3",
                "processes=1",
            ]
        )
        == 0
    )
    index, tokenizer = read_index(tmp_path / "a"), load_tokenizer(str(folder))
    ids = np.concatenate([np.fromfile(shard.path, "<u2") for shard in index.shards])
    assert index.selection == {} and id_of(folder, "<|turn|>") not in ids
    assert sum(split.tokens for split in index.splits.values()) == sum(
        2 + len(tokenizer.encode(text)) for text in texts
    )


def test_control_tokens_not_called_special_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = make_folder(tmp_path / "tokenizer", PLAIN)
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["added_tokens"][-1]["special"] = False  # <|over|>
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    path = write_rows(tmp_path / "a.jsonl", [{"text": f"<|over|> {n}"} for n in range(30)])
    for word, is_special in (("ids", True), ("text", False)):
        out = tmp_path / word
        words = [
            "local",
            str(path),
            "name=a",
            f"tokenizer={folder}",
            f"out={out}",
            "val_share=0.3",
            "processes=1",
        ]
        assert main([*words, f"control_tokens={word}"]) == 0
        sentence = capsys.readouterr().err
        assert (
            "one of its 1 control tokens (<|over|>) it becomes that token" in sentence
        ) is is_special
        index = read_index(out / "a")
        assert (
            id_of(folder, "<|over|>")
            in np.concatenate([np.fromfile(s.path, "<u2") for s in index.shards])
        ) is is_special
        assert index.selection == ({} if is_special else {"control_tokens": "text"})
        assert index.tokenizer_sha256 == load_tokenizer(str(folder)).sha256
    assert main([*words, "control_tokens=ids"]) == 2, "the rules of one folder are not mixed"
    assert "control_tokens" in capsys.readouterr().err


# the selection of shards in which special tokens are text
FORMER = {"instruct": ["prompt", "response"]}


def test_finished_instruct_shards_of_the_former_rule_stay_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = make_folder(tmp_path / "tokenizer", PLAIN)
    prepare(tmp_path, PAIRS, folder)
    path = tmp_path / "data/chat/index.json"
    index = json.loads(path.read_text())
    del index["sha256"], index["format_version"]
    write_index(path.parent, index | {"selection": FORMER})
    content = path.read_bytes()
    capsys.readouterr()
    prepare(tmp_path, [], folder)
    assert (
        "special tokens that its rows spell are text, as they were before"
        in capsys.readouterr().out
    )
    assert path.read_bytes() == content


def test_half_made_shards_of_the_former_rule_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    folder = make_folder(tmp_path / "tokenizer", PLAIN)

    def interrupt(*_: object):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "write_shards", interrupt)
        prepare(tmp_path, PAIRS, folder, code=130)
    begun = tmp_path / "data/chat/parts/begun.json"
    begun.write_text(json.dumps(json.loads(begun.read_text()) | {"selection": FORMER}))
    prepare(tmp_path, [], folder, code=2)
    assert "is of selection={'instruct': ['prompt', 'response']}, not" in capsys.readouterr().err


# ------------------------------------------------------------------- what rows of messages hold

# Writes content in parts as templates of models that see images do.
KNOWS_PARTS = PLAIN.replace(
    "{{ message.content | trim }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in"
    " message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{%"
    " endif %}",
)
ADDS_PARTS = PLAIN.replace("{{ message.content | trim }}", "{{ 'x' + message.content }}")
AS_JSON = PLAIN.replace("message.content | trim", "message.content | tojson")


def in_parts(messages: list[dict]):
    """The messages with each content in parts as OpenAI's format has it."""
    return [
        message | {"content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]


@pytest.mark.parametrize("template", [PLAIN, MARKED, BRACKETS, KNOWS_PARTS, ADDS_PARTS, AS_JSON])
def test_content_in_parts_is_the_text_of_its_parts(tmp_path: Path, template: str):
    folder = make_folder(tmp_path, template)
    transformers_own, ours = AutoTokenizer.from_pretrained(folder), ChatTemplate(str(folder))
    for messages in CONVERSATIONS:
        assert ours.render(
            {"messages": in_parts(messages)}
        ).text == transformers_own.apply_chat_template(messages, tokenize=False)


def test_joined_parts_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = make_folder(tmp_path / "tokenizer", PLAIN)
    prepare(tmp_path, [{"messages": in_parts(messages)} for messages in spread([])], folder)
    assert "joined: 24 messages of chat.jsonl were lists of parts" in capsys.readouterr().out


QUESTION = {"role": "user", "content": "q?"}
ANSWER = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    "messages, words",
    [
        (
            [QUESTION | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER],
            (
                'message 1, of the role user, has a part of type "image_url", but only text is'
                " learned here"
            ),
        ),
        (
            [QUESTION | {"content": 5}, ANSWER],
            "message 1, of the role user, has content that is int",
        ),
        (
            [{"role": "human", "content": "q"}, {"role": "gpt", "content": "a"}],
            "no message has the role assistant, whose messages are learned, only human, gpt",
        ),
        ([QUESTION], "no message has the role assistant, whose messages are learned, only user"),
        (
            [QUESTION, ANSWER | {"content": None}],
            "message 2, of the role assistant, has no content",
        ),
        ([QUESTION, ANSWER | {"weight": 0.5}], "message 2 has weight=0.5"),
        ([QUESTION | {"weight": 1}, ANSWER], "message 1 has weight=1 and the role user"),
        (
            [QUESTION, ANSWER | {"weight": 0}],
            "each answer has weight=0, so nothing would be learned",
        ),
    ],
)
def test_a_conversation_of_which_nothing_can_be_learned_is_an_odd_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], messages: list[dict[str, Any]], words: str
):
    folder = make_folder(tmp_path / "tokenizer", PLAIN)
    prepare(
        tmp_path,
        [{"messages": messages}, *({"messages": messages} for messages in spread([]))],
        folder,
        code=2,
    )
    sentence = capsys.readouterr().err
    assert (
        f"chat.jsonl:1: {words}" in sentence
        and "or add skip_bad=true to leave out such rows" in sentence
    )
    prepare(tmp_path, [], folder, "skip_bad=true")
    assert "left out: 1 rows of chat.jsonl" in capsys.readouterr().out


def test_an_answer_that_is_a_call_of_a_tool_needs_no_content(tmp_path: Path):
    folder = make_folder(
        tmp_path, PLAIN.replace("message.content | trim", "message.tool_calls or message.content")
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert "'name': 'f'" in ChatTemplate(str(folder)).render({"messages": [QUESTION, call]}).text


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_an_answer_of_weight_0_is_context(tmp_path: Path, template: str):
    folder = make_folder(tmp_path, template)
    messages = [QUESTION, ANSWER | {"weight": 0}, QUESTION, ANSWER | {"content": "no", "weight": 1}]
    without = [
        {key: value for key, value in message.items() if key != "weight"} for message in messages
    ]
    chat = ChatTemplate(str(folder)).render({"messages": messages})
    assert chat.text == AutoTokenizer.from_pretrained(folder).apply_chat_template(
        without, tokenize=False
    )
    assert [chat.text[first:last].rstrip() for first, last in chat.spans] == ["no<|over|>"]


@pytest.mark.parametrize("template", [None, ALWAYS_BEGINS])
def test_no_row_is_blamed_for_a_template_that_cannot_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str | None
):
    prepare(
        tmp_path,
        [{"messages": CONVERSATIONS[0]}],
        make_folder(tmp_path / "tokenizer", template),
        code=2,
    )
    sentence = capsys.readouterr().err
    assert (
        "chat template" in sentence
        and "skip_bad" not in sentence
        and "chat.jsonl:1" not in sentence
    )


# ------------------------------------------------------------------------------ kinds of rows


@pytest.mark.parametrize(
    "first_row", ['{"id": 1}', "[1]", "{", '{"prompt": null, "response": null}']
)
def test_an_odd_first_row_does_not_decide_of_what_kind_the_others_are(
    tmp_path: Path, first_row: str
):
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": messages} for messages in spread([])])
    path.write_text(first_row + "\n" + path.read_text())
    prepare(tmp_path, [], make_folder(tmp_path / "tokenizer", PLAIN), "skip_bad=true")
    index = read_index(tmp_path / "data/chat")
    assert (
        index.selection["instruct"] == ["messages"]
        and sum(split.documents for split in index.splits.values()) == 12
    )


def test_rows_that_are_pairs_and_conversations_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [
        {"messages": messages, **pair} for messages, pair in zip(spread([]), PAIRS, strict=False)
    ]
    prepare(tmp_path, rows, make_folder(tmp_path / "tokenizer", PLAIN))
    assert (
        "prompt and response as well as messages; the responses are learned"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("kind", ["pairs", "messages", "messages in parts and not"])
def test_instructions_of_parquet_are_those_of_json_lines(tmp_path: Path, kind: str):
    import datasets

    folder = make_folder(tmp_path / "tokenizer", PLAIN)
    # `datasets` keeps a text that is JSON itself, such as 1, without quotes.
    texts = [[QUESTION | {"content": f"q {n}?"}, ANSWER] for n in range(20)]
    rows = PAIRS if kind == "pairs" else [{"messages": messages} for messages in texts]
    documents = []
    for name in ("chat.jsonl", "chat.parquet"):
        path = tmp_path / name
        if name.endswith(".parquet"):
            if kind == "messages in parts and not":
                rows = [
                    row if n % 2 else {"messages": in_parts(row["messages"])}
                    for n, row in enumerate(rows)
                ]
            datasets.disable_progress_bars()
            datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(path)
        else:
            write_rows(path, rows)
        out = tmp_path / path.suffix[1:]
        words = [
            "local",
            str(path),
            "name=chat",
            "instruct=true",
            f"tokenizer={folder}",
            f"out={out}",
        ]
        assert main([*words, "val_share=0.3", "processes=1"]) == 0
        documents.append(read_documents(out / "chat"))
    assert documents[0] == documents[1]


def test_a_prompt_by_apply_chat_template_begins_once(tmp_path: Path):
    folder = make_folder(tmp_path / "tokenizer", PLAIN)
    transformers_own = AutoTokenizer.from_pretrained(folder)
    questions = [[{"role": "user", "content": f"q {n}?"}] for n in range(20)]
    prompts = [
        transformers_own.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        for question in questions
    ]
    prepare(tmp_path, [{"prompt": prompt, "response": "yes"} for prompt in prompts], folder)
    contexts = [
        [i for i, is_learned in zip(*document, strict=True) if not is_learned]
        for document in read_documents(tmp_path / "data/chat", eot=1)
    ]
    assert sorted(contexts) == sorted(
        transformers_own.encode(prompt, add_special_tokens=False) for prompt in prompts
    )


def test_a_touched_file_of_conversations_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = make_folder(tmp_path / "tokenizer", PLAIN)
    rows = [{"messages": messages} for messages in spread([])]
    prepare(tmp_path, rows, folder)
    os.utime(tmp_path / "chat.jsonl", (1, 1))
    prepare(tmp_path, [], folder)
    assert "is complete" in capsys.readouterr().out
