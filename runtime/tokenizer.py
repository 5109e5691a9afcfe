"""Turn text into token ids and back.

Two tokenizers are built in, both offline: `gpt2` is GPT-2's byte-pair encoding, run by tiktoken on
merges that lie beside this file; `byte` is the 256 byte values. In both the last id is the
end-of-text token, which stands before every document. Any other is a folder with tokenizer.json and
tokenizer_config.json, Hugging Face's layout, read by their package `tokenizers`."""

import json
import lzma
import re
import shutil
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lib.errors import UserError
from lib.files import write_json
from runtime.letters import BYTE_LETTERS
from runtime.pieces import build_encoder

VOCAB_SIZE = {"gpt2": 50257, "byte": 257}  # the built-in ones
# The files of a tokenizer folder. The first two are read and must be there; the others only go with
# a copy.
FOLDER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
CONTROL_TOKEN = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")  # <tool_call>, <|fim_prefix|>, [INST]
GENERATION_FILE = "generation_config.json"
ENDS_FILES = (GENERATION_FILE, "config.json")  # which name the ids that end a generated text

# OpenAI's vocab.bpe (2019, modified MIT licence), compressed: the 50,000 merges of GPT-2, and their
# hash, gpt2's identity.
MERGES_FILE = Path(__file__).with_name("gpt2_vocab_bpe.xz")
VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
END_OF_TEXT = "<|endoftext|>"
# Radford et al. 2019. The group holds all alternatives without a lookahead, which fancy_regex then
# hands to one automaton: the pieces of tiktoken's own copy, which it tries one after the other, in
# 0.6 of the time of encoding.
GPT2_PATTERN = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+$)|\s+(?!\S)|\s"

# tiktoken 0.14 keeps a record per character of a run of white space that text follows, and fails at
# a million of them: such a run is cut before its last character, where the pattern begins a new
# piece anyway.
# its \s; Python's holds four more
WHITE_SPACE = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
LONG_RUN_LENGTH = 500_000
LONG_RUN = re.compile(f"(?<!{WHITE_SPACE}){WHITE_SPACE}{{{LONG_RUN_LENGTH},}}")


@dataclass(frozen=True)
class Tokenizer:
    """Built by load_tokenizer()."""

    name: str  # what it was loaded by: "gpt2", "byte" or a folder
    # -> hashes; takes seconds where the vocabulary is large
    _identify: Callable[[], tuple[str, ...]]
    vocab_size: int  # every id is below; a folder's added tokens included
    # before each document in a shard: end of text, begin of text if there is one
    prefix: tuple[int, ...]
    _encode: Callable[[str], list[int] | np.ndarray]  # text without lone surrogates -> ids
    _decode: Callable[[list[int]], str]
    # The same of a text in which special tokens are tokens where it spells them.
    _encode_special: Callable[[str], list[int] | np.ndarray]
    # The same and, of each id, the first and the last character + 1 of the text: of a folder alone.
    _encode_places: Callable[[str], tuple[list[int], list[tuple[int, int]]]] | None = None
    adds_start: bool = False  # whether it puts `start` before a text itself, as Llama's does
    other_ends: tuple[int, ...] = ()  # ids beside `eot` that end a generated text
    # tokens that are no text: end of text and what a folder marks as special
    special_ids: frozenset[int] = frozenset()
    # Tokens for control, such as <tool_call>, that tokenizer.json does not call special: they are
    # tokens where plain text spells them too.
    control_tokens: tuple[str, ...] = ()
    unknown: int | None = None  # id of text that it cannot spell, <unk>; built-in ones spell all

    @property
    def kind(self) -> str:
        return tokenizer_kind(self.name)

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        """Identities of the rules: today's, then the one that older shards and runs carry."""
        return self._identify()

    @property
    def sha256(self) -> str:
        """Identity of the rules: equal where all ids are, however the files are written. The
        shards' index.json carries it."""
        return self.hashes[0]

    def goes_by(self, sha256: str | None) -> bool:
        """Whether shards or a run that carry this hash were made with this tokenizer."""
        return sha256 in self.hashes

    @property
    def eot(self) -> int:
        return self.prefix[0]  # ends a text

    @property
    def ends(self) -> tuple[int, ...]:
        """Each of these ids ends a generated text; `eot` is the first."""
        return (self.eot, *self.other_ends)

    @property
    def start(self) -> int:
        return self.prefix[-1]  # before the first token of every document, so of a prompt too

    @property
    def dtype(self) -> str:
        return "<u2" if self.vocab_size <= 2**16 else "<u4"  # of the ids, by NumPy's name

    def encode(self, text: str) -> np.ndarray:
        """The ids of clean(text), of self.dtype, without special tokens: text that spells
        <|endoftext|> stays text."""
        return np.array(self._encode(clean(text)), self.dtype)

    def encode_special(self, text: str) -> np.ndarray:
        """The ids of clean(text), of self.dtype, in which what spells a special token is that
        token, as transformers reads a text."""
        return np.array(self._encode_special(clean(text)), self.dtype)

    def encode_marked(
        self, text: str, spans: list[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a text without lone surrogates, as encode_special() has them, and which of
        them have a character in one of the `spans` (first, last + 1), bool of the same length."""
        assert self._encode_places is not None, "only a folder has chat templates"
        ids, places = self._encode_places(text)
        starts, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
        is_marked = np.zeros(len(ids), bool)
        for first, last in spans:
            is_marked |= (starts < last) & (ends > first)
        return np.array(ids, self.dtype), is_marked

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD. Special tokens are spelled,
        or left out with skip_special. Raises ValueError for an id outside the vocabulary."""
        ids = [int(i) for i in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(
                f"{self.name} has ids 0 to {self.vocab_size - 1}, but was given {min(ids)} to"
                f" {max(ids)}"
            )
        if skip_special:
            ids = [i for i in ids if i not in self.special_ids]
        return self._decode(ids)


def tokenizer_kind(name: str) -> str:
    """How index.json and summaries name it: "gpt2", "byte" or "folder" (the sha256 says which)."""
    return name if name in VOCAB_SIZE else "folder"


def clean(text: str) -> str:
    """The text as it is hashed, counted and tokenised. Python strings may hold halves of UTF-16
    pairs (JSON's \\ud83d), which have no UTF-8 form: a pair becomes its character, a lone half
    U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def load_tokenizer(name: str, control_tokens: str = "ids") -> Tokenizer:
    """Of this name, "gpt2" or "byte", or in this folder. control_tokens="text": its
    `control_tokens` stay text where plain text spells them, as special tokens do. Raises
    UserError."""
    if name == "gpt2":
        return _load_gpt2(name)
    if name == "byte":
        return _load_byte(name)
    return _load_folder(name, control_tokens)


def _load_byte(name: str) -> Tokenizer:
    letters = [*(bytes([b]) for b in range(256)), END_OF_TEXT.encode()]
    digest = sha256(b"one id per byte, then 256 for end of text").hexdigest()

    def encode_special(text: str) -> list[int]:
        first, *further_texts = text.split(END_OF_TEXT)
        ids = [*first.encode()]
        for further_text in further_texts:
            ids += [256, *further_text.encode()]
        return ids

    return Tokenizer(
        name,
        lambda: (digest,),
        VOCAB_SIZE[name],
        (256,),
        lambda text: np.frombuffer(text.encode(), np.uint8),
        lambda ids: b"".join(map(letters.__getitem__, ids)).decode("utf-8", errors="replace"),
        encode_special,
        special_ids=frozenset({256}),
    )


def _load_gpt2(name: str) -> Tokenizer:
    import tiktoken

    ranks = {token: rank for rank, token in enumerate(token_bytes())}
    gpt2 = tiktoken.Encoding(
        "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 50256}
    )

    def encode(text: str, allowed_special: Set[str] = frozenset()) -> np.ndarray:
        runs = LONG_RUN.finditer(text) if len(text) > LONG_RUN_LENGTH else ()
        cuts = [0, *(run.end() - 1 for run in runs if run.end() < len(text)), len(text)]
        return np.concatenate(
            [
                gpt2.encode_to_numpy(
                    text[a:b], allowed_special=allowed_special, disallowed_special=()
                )
                for a, b in pairwise(cuts)
            ]
        )

    return Tokenizer(
        name,
        lambda: (VOCAB_BPE_SHA256,),
        VOCAB_SIZE[name],
        (50256,),
        encode,
        gpt2.decode,
        lambda text: encode(text, {END_OF_TEXT}),
        special_ids=frozenset({50256}),
    )


def token_bytes() -> list[bytes]:
    """The bytes of gpt2's ids 0 to 50255: single bytes in GPT-2's order, then each merge's two
    parts joined."""
    bytes_of = {letter: b for b, letter in BYTE_LETTERS.items()}
    merges = vocab_bpe().decode().splitlines()[1:]
    return [
        bytes(map(bytes_of.__getitem__, word.replace(" ", ""))) for word in (*bytes_of, *merges)
    ]


def vocab_bpe() -> bytes:
    """OpenAI's vocab.bpe: a heading, then one merge a line, bytes written as printable
    characters."""
    return lzma.decompress(MERGES_FILE.read_bytes())  # which holds a checksum


def _load_folder(name: str, control_tokens: str = "ids") -> Tokenizer:
    """Of tokenizer_config.json, and special_tokens_map.json where it names none, only the tokens
    that end and begin a text are read: no code, no template. generation_config.json and
    config.json, where the folder has them, may name more tokens that end a text."""
    folder = _read_folder(name, control_tokens)
    fast, eos, bos = folder.fast, folder.eos, folder.bos
    prefix = (eos,) if bos in (None, eos) else (eos, bos)
    special_ids = {*folder.special_tokens, *prefix}

    def identify() -> tuple[str, ...]:
        # The control tokens as text are no other tokenizer: each id means the same.
        whole = fast if folder.is_as_written else _tokenizer_of_rules(folder.rules)
        written = sha256(folder.rules + b"\0" + json.dumps([eos, bos]).encode()).hexdigest()
        return _identity(whole, [eos, bos]), written

    def encode_places(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        fast.encode_special_tokens = False
        try:
            encoding = fast.encode(text, add_special_tokens=False)
        finally:
            fast.encode_special_tokens = True
        return encoding.ids, encoding.offsets

    def encode_whole(text: str) -> list[int]:
        # By this call the package keeps no places in the text: half of the memory.
        return fast.encode_batch_fast([text], add_special_tokens=False)[0].ids

    return Tokenizer(
        name,
        identify,
        folder.vocab_size,
        prefix,
        build_encoder(fast, encode_whole),
        lambda ids: fast.decode(ids, skip_special_tokens=False),
        lambda text: encode_places(text)[0],
        encode_places,
        # by its post-processor; a bos_token's name alone adds none
        adds_start=folder.first_ids == [prefix[-1]],
        other_ends=_other_ends(Path(name), eos, folder.vocab_size),
        control_tokens=folder.control_tokens,
        special_ids=frozenset(special_ids),
        unknown=folder.unknown,
    )


@dataclass(frozen=True, kw_only=True)
class _Folder:
    """What the files of a folder say."""

    rules: bytes  # tokenizer.json as it is on disk
    is_as_written: bool  # whether `fast` is of these rules: not where control tokens are text
    fast: Any  # the tokenizer of the package `tokenizers`
    eos: int  # id of the token that ends a document
    bos: int | None  # id of the token that begins one
    vocab_size: int  # the highest id, and one
    first_ids: list[int]  # the first id of an encoded text, with what the post-processor adds
    control_tokens: Any  # as _control_tokens() has them
    special_tokens: dict[int, str]  # id -> how it is spelled
    unknown: int | None  # id of text that it cannot spell


def _read_folder(name: str, control_tokens: str) -> _Folder:
    """Raises UserError where the folder holds no tokenizer that gives a text the same ids each time
    and ends each document."""
    path = Path(name)
    file, config = path / FOLDER_FILES[0], path / FOLDER_FILES[1]
    if path.is_file():
        raise UserError(
            f"tokenizer={name!r} is a file: name the folder that holds tokenizer.json and"
            f" tokenizer_config.json, such as {path.parent}"
        )
    if not file.is_file():
        raise UserError(
            f"there is no tokenizer {name!r}; there are: {', '.join(VOCAB_SIZE)}, a folder,"
            " but that one has no tokenizer.json: transformers'"
            " AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it"
        )
    try:
        rules, roles = file.read_bytes(), read_roles(path)
        control = _control_tokens(json.loads(rules))
        has_plain_control = bool(control) and control_tokens == "text"
        fast = _tokenizer_of_rules(_as_special(rules, control) if has_plain_control else rules)
        fast.encode_special_tokens = True  # text that spells a special token stays text
        # rules that fail on some text should fail here
        first_ids = fast.encode("any word \u00e9\n").ids[:1]
        vocab_size = 1 + max(fast.get_vocab(with_added_tokens=True).values())  # ids may have gaps
        eos_token, bos_token = _spelled(roles, "eos_token"), _spelled(roles, "bos_token")
        eos, bos = _id_of(fast, eos_token), _id_of(fast, bos_token)
        model = json.loads(rules)["model"]
        unknown = model.get("unk_id", _id_of(fast, model.get("unk_token")))
    except Exception as error:  # the package has no class of its own
        raise UserError(
            f"{file} and {config.name} cannot be read ({error}): both must be as transformers'"
            " save_pretrained(...) writes them"
        ) from error
    dropout = getattr(fast.model, "dropout", None)
    if dropout:
        raise UserError(
            f"{file} has dropout={dropout:g} in its model, by which a text gets other ids at each"
            " call: set it to null, for shards must be the same each time"
        )
    added_tokens = fast.get_added_tokens_decoder().items()
    special_tokens = {i: token.content for i, token in added_tokens if token.special}
    if eos is None or (bos is None) != (bos_token is None):
        spelled = ", ".join(list(special_tokens.values())[:10])
        raise UserError(
            f"{config} says eos_token={eos_token!r:.60} and bos_token={bos_token!r:.60}, but a"
            f" token of {file.name} must end each document, and begin it where one is named: name"
            f" one of its tokens there; its special ones are {spelled or 'none'}"
        )
    return _Folder(
        rules=rules,
        is_as_written=not has_plain_control,
        fast=fast,
        eos=eos,
        bos=bos,
        vocab_size=vocab_size,
        first_ids=first_ids,
        control_tokens=control,
        special_tokens=special_tokens,
        unknown=unknown,
    )


def _tokenizer_of_rules(rules: bytes) -> Any:
    import tokenizers

    fast = tokenizers.Tokenizer.from_buffer(rules)
    fast.no_truncation()
    fast.no_padding()
    return fast


def _spelled(roles: dict[str, Any], role: str) -> str | None:
    """How the token of a role is spelled; transformers writes it bare, or with its properties."""
    token = roles.get(role)
    return token["content"] if isinstance(token, dict) else token


def _id_of(fast: Any, token: str | None) -> int | None:
    return None if token is None else fast.token_to_id(token)


def read_roles(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with the tokens that special_tokens_map.json alone names, as older
    folders have it. Raises OSError and ValueError: a file that cannot be read, or neither is
    there."""
    config, special = (folder / name for name in FOLDER_FILES[1:3])
    if not special.is_file():
        return json.loads(config.read_bytes())
    settings = json.loads(config.read_bytes()) if config.is_file() else {}
    tokens = json.loads(special.read_bytes())
    if not isinstance(settings, dict) or not isinstance(tokens, dict):
        raise ValueError(
            "a JSON object is expected in tokenizer_config.json and special_tokens_map.json"
        )
    named = {key: value for key, value in settings.items() if value is not None}
    roles = {key: value for key, value in tokens.items() if key.endswith("_token")}
    return settings | roles | named


def _control_tokens(rules: dict) -> tuple[str, ...]:
    """The added tokens that look like ones for control but are not called special, in their
    order."""
    return tuple(
        token["content"]
        for token in rules.get("added_tokens") or ()
        if not token.get("special") and CONTROL_TOKEN.fullmatch(token["content"])
    )


def _as_special(rules: bytes, contents: tuple[str, ...]) -> bytes:
    """The tokenizer.json in which the added tokens of these `contents` are special."""
    content = json.loads(rules)
    for token in content["added_tokens"]:
        token["special"] = token["special"] or token["content"] in contents
    return json.dumps(content).encode()


def _identity(fast, roles: list[int | None]) -> str:
    """SHA-256 of what a tokenizer does to a text, equal however its file is written:
    save_pretrained respells merges, adds keys with their defaults and notes lengths for padding.

    roles: the ids of the tokens that end and begin a text.
    """
    rules = json.loads(fast.to_str())  # the package's own spelling, with all defaults
    model = rules["model"]
    vocab, merges = model.pop("vocab"), model.pop("merges", [])
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    text = "any word \u00e9\n"
    identity = {
        "normalizer": _without_defaults(rules["normalizer"]),
        "pre_tokenizer": _without_defaults(rules["pre_tokenizer"]),
        "added_tokens": [_without_defaults(token) for token in rules["added_tokens"]],
        "model": _without_defaults(model),
        "vocab": vocab,
        "merges": pairs,
        # What a post-processor puts around a text is all that it does to ids.
        "framed": fast.encode(text).ids,
        "roles": roles,
    }
    return sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _without_defaults(value):
    """A part of tokenizer.json without what changes no id: keys that say nothing (null, false, an
    empty text or list), which versions of the package leave out or write, and the trimming of
    offsets."""
    if isinstance(value, list):
        return [_without_defaults(part) for part in value]
    if not isinstance(value, dict):
        return value
    parts = {key: _without_defaults(part) for key, part in value.items() if key != "trim_offsets"}
    return {key: part for key, part in parts.items() if not _says_nothing(part)}


def _says_nothing(value) -> bool:
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def _other_ends(folder: Path, eot: int, vocab_size: int) -> tuple[int, ...]:
    """The ids beside `eot` that the folder's generation_config.json and config.json call the end of
    a text, in their order. transformers' generate() stops at any of them.

    An id that the tokenizer does not have is left out: no text becomes it and nothing generates it.
    Raises UserError where a file cannot be read or names something else than ids.
    """
    ends = [eot]
    for name in ENDS_FILES:
        for end in end_ids(folder / name):
            if end not in ends and end < vocab_size:
                ends.append(end)
    return tuple(ends[1:])


def end_ids(path: Path) -> list[int]:
    """The eos_token_id of a generation_config.json or config.json, a number or a list in the file.

    Empty where there is no such file or it names none. Raises UserError where it cannot be read.
    """
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {type(content).__name__}, not a JSON object: fetch it again")
    named = content.get("eos_token_id")
    if named is None:
        return []
    ids = named if isinstance(named, list) else [named]
    for end in ids:
        # A bool is an int to Python.
        if not isinstance(end, int) or isinstance(end, bool) or end < 0:
            raise UserError(
                f"{path} has eos_token_id={named!r:.80}: it must be an id or a list of ids"
            )
    return ids


def tokenizer_of(run_dir: Path, name: str) -> str:
    """What to load as a run's data.tokenizer: the run's own copy, where that is a folder and the
    run has one."""
    copy = Path(run_dir) / "tokenizer"
    is_folder = name not in VOCAB_SIZE
    return str(copy) if is_folder and (copy / FOLDER_FILES[0]).is_file() else name


def keep_tokenizer(run_dir: Path, name: str) -> None:
    """Copy a tokenizer that is a folder into the run's own folder, so that the run can be moved
    without it."""
    copy, part = Path(run_dir) / "tokenizer", Path(run_dir) / ".tokenizer.tmp"
    if name in VOCAB_SIZE or copy.exists():
        return
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    shutil.copytree(name, part, ignore=lambda _, names: set(names) - set(FOLDER_FILES))
    _keep_ends(part / GENERATION_FILE, end_ids(Path(name) / "config.json"))
    part.rename(copy)


def _keep_ends(path: Path, ends: list[int]) -> None:
    """Let the copy's generation_config.json name the `ends` of the folder's config.json, which is
    the model's and stays behind. Where it names them all it stays as it is."""
    named = end_ids(path)
    if set(named) >= set(ends):
        return
    content = json.loads(path.read_bytes()) if path.is_file() else {}
    write_json(path, content | {"eos_token_id": with_ends(named, ends)})


def with_ends(named: list[int], ends: Iterable[int]) -> int | list[int]:
    """The eos_token_id of a file that names `named`, with all `ends`: a number where it is one."""
    ids = list(dict.fromkeys([*named, *ends]))
    return ids[0] if len(ids) == 1 else ids
