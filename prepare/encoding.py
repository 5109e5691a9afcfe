"""Rows to documents: the hash that names each, and its ids."""

import json
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b

import numpy as np

from prepare.chat import ChatTemplate, OddConversation, Rendered
from prepare.decontaminate import found_in
from prepare.sources import Reading, SourceRow
from runtime.shards import LOSS_MASK_BIT
from runtime.tokenizer import END_OF_TEXT, Tokenizer, clean, load_tokenizer

NO_DOCUMENT = 0  # in place of the hash of an empty row
BORDER = b"\0"  # between prompt and response where the two are hashed as one


@dataclass(frozen=True)
class Document:
    """A row of an input file as its piece holds it."""

    hash: int  # of the text; NO_DOCUMENT where there is none
    bytes: int  # of its UTF-8, those of a prompt left out
    ids: list[np.ndarray]  # its tokens, in parts; none where it is empty or contaminated


@dataclass(frozen=True)
class CleanRow:
    """The text of a row: (text,), (prompt, response), or what a chat template made of messages."""

    texts: list[str]  # as the hash has them; the last is what is learned
    chat: Rendered | None = None

    @cached_property
    def utf8(self) -> list[bytes]:
        return [text.encode() for text in self.texts]

    @property
    def hash(self) -> int:
        """The name of a document: blake2b-64 of its UTF-8 bytes; NO_DOCUMENT where there is no text
        to be learned."""
        learned = self.texts[-1]
        if not learned or learned.isspace():
            return NO_DOCUMENT
        digest = blake2b(BORDER.join(self.utf8), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def clean_row(tokenizer: Tokenizer, row: SourceRow, reading: Reading) -> CleanRow | None:
    """A row with halves of UTF-16 pairs replaced; None for a conversation that cannot be used,
    where odd rows are skipped. Raises UserError and BadFile."""
    if row.conversation is None:
        return CleanRow([clean(text) for text in row.texts])
    chat = _render(tokenizer, row, reading)
    if chat is None:
        return None
    learned = "".join(chat.text[first:last] for first, last in chat.spans)
    return CleanRow([chat.text, learned], chat)


@dataclass(frozen=True)
class Encoder:
    """Turns rows into documents."""

    tokenizer: Tokenizer
    grams: np.ndarray  # of the evaluation files, by read_grams()
    reading: Reading  # of the file; counts what cannot be used

    def encode(self, row: SourceRow) -> Document | None:
        """None for a conversation that cannot be used, where odd rows are skipped. Raises
        UserError and BadFile."""
        cleaned = clean_row(self.tokenizer, row, self.reading)
        if cleaned is None:
            return None
        name = cleaned.hash
        if name == NO_DOCUMENT:
            return Document(NO_DOCUMENT, 0, [])
        n_bytes = len(cleaned.utf8[-1])
        if len(self.grams) and found_in(self.grams, " ".join(cleaned.texts)):
            return Document(name, n_bytes, [])
        if cleaned.chat:
            return Document(name, n_bytes, _chat_ids(self.tokenizer, cleaned.chat))
        return Document(name, n_bytes, _ids(self.tokenizer, cleaned.texts))

    def count_unknown(self, ids: np.ndarray) -> int:
        """How many of a document's ids stand for text that the tokenizer cannot spell."""
        unknown = self.tokenizer.unknown
        return 0 if unknown is None else int((ids & ~LOSS_MASK_BIT == unknown).sum())


def borders_of(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The lines that end a document in a text file: how the tokenizer spells its end of text,
    and how GPT-2 does."""
    spelled = tokenizer.decode([tokenizer.eot]).strip()
    return tuple(dict.fromkeys(filter(None, [spelled, END_OF_TEXT])))


def _ids(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Prefix and text. Of a prompt and a response, LOSS_MASK_BIT marks what is no target: all but
    the prefix's first token, with which the document before ends, and the response. The two are
    encoded by themselves: no token reaches over the border."""
    start = np.array(tokenizer.prefix, tokenizer.dtype)
    if len(texts) == 1:
        return [start, tokenizer.encode(texts[0])]
    # <|user|> in an instruction is that token
    ids = [tokenizer.encode_special(text) for text in texts]
    first = 0 if len(ids[0]) else 1
    if len(start) > 1 and ids[first][:1].tolist() == [tokenizer.start]:
        ids[first] = ids[first][1:]  # apply_chat_template() wrote the token that begins a text
    start, context, response = (part.astype("<u4") for part in (start, *ids))
    return [start[:1], LOSS_MASK_BIT | start[1:], LOSS_MASK_BIT | context, response]


def _render(tokenizer: Tokenizer, row: SourceRow, reading: Reading) -> Rendered | None:
    """The conversation by the tokenizer folder's chat template, halves of UTF-16 pairs replaced;
    None where it cannot be used and odd rows are skipped. Raises UserError and BadFile."""
    template = cached_template(tokenizer.name)
    cleaned = json.loads(clean(json.dumps(row.conversation, ensure_ascii=False)))
    try:
        rendered = template.render(cleaned)
    except OddConversation as error:
        reading.rows -= 1
        reading.skip_or_refuse(row.place, f": {error.problem}", error.remedy)
        return None
    reading.joined_lists += rendered.joined_parts
    return rendered


def _chat_ids(tokenizer: Tokenizer, chat: Rendered) -> list[np.ndarray]:
    """The end-of-text token and the conversation's ids. LOSS_MASK_BIT marks all that the assistant
    did not write. The template alone decides on a token that begins a text."""
    ids, is_learned = tokenizer.encode_marked(chat.text, chat.spans)
    marks = np.where(is_learned, np.uint32(0), LOSS_MASK_BIT)
    return [LOSS_MASK_BIT | np.array([tokenizer.eot], "<u4"), marks | ids.astype("<u4")]


cached_tokenizer = cache(load_tokenizer)
cached_template = cache(ChatTemplate)
