"""The letters by which byte-level tokenizers write bytes."""

# Each byte's letter in vocab.bpe, in the order of GPT-2's ids 0 to 255: printable Latin-1 bytes
# stand for themselves and come first; the others take the letters from U+0100 on.
BYTE_LETTERS = {b: chr(b) for b in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
BYTE_LETTERS |= {
    b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in BYTE_LETTERS)
}
