"""Documents for tests, and the files that hold them."""

import gzip
import io
import json
import lzma
import random

import pyarrow
import pyarrow.parquet
import zstandard

PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}


def some_documents(n=40, seed=0):
    rng = random.Random(seed)
    words = ["the", "naïve", "<|endoftext|>", "日本", "x = 1\n", "  ", "\t", "🙂", "def f():", "0.5", "\u2028"]
    return ["".join(rng.choice(words) + " " for _ in range(rng.randrange(1, 60))) + str(i) for i in range(n)]


DOCUMENTS = some_documents()


def jsonl(documents, column="text"):
    return "".join(json.dumps({"id": i, column: d}) + "\n" for i, d in enumerate(documents)).encode()


def parquet(documents, column="text", type=None):
    file = io.BytesIO()
    table = pyarrow.table({"id": list(range(len(documents))), column: pyarrow.array(documents, type)})
    pyarrow.parquet.write_table(table, file, row_group_size=7)
    return file.getvalue()
