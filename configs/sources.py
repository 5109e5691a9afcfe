"""The sources of the real mixture: where each lies on the Hugging Face Hub, at which commit, under
which licence.

All are open (no account, no token) and need no loading script. `python prepare_data.py
--check-sources` asks each for its first record. Tokens are GPT-2's, about, of the whole source."""

from prepare.sources import Source

# Python and C lie in one repository. Each file's own license is in metadata.license.
STACK = {
    "dataset": "common-pile/stackv2_edu_filtered",
    "revision": "c354dbe88469a1153e97c6a63ac50591849654de",
    "files": "stack-edu-*.json.gz",
    "license": "permissive, per file (Blue Oak Council's list)",
}
LANGUAGE = "metadata.language"  # of the file; metadata.gha_language is the repository's

SOURCES: dict[str, Source] = {
    "fineweb_edu": Source(
        dataset="HuggingFaceFW/fineweb-edu",
        revision="87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
        files="sample/100BT/*.parquet",  # sample/10BT is too small: 80 % of 31B tokens are 24.8B
        license="ODC-By 1.0",  # of the collection; each page keeps its own rights
        tokens=100e9,
    ),
    # 12 of 95 files, grouped by language, Markdown first: reading the first files would never reach
    # Python.
    "python": Source(**STACK, tokens=8e9, keep={LANGUAGE: ("Python",)}, grouped_by=LANGUAGE),
    # Which files hold C is written nowhere: the first record of each is asked for.
    "c": Source(**STACK, tokens=None, keep={LANGUAGE: ("C",)}, grouped_by=LANGUAGE),
    "arxiv": Source(
        dataset="common-pile/arxiv_papers_filtered",
        revision="033cf7f53f9b348deec868c1a5a48484f3ee9e52",
        files="arxiv-papers-*.json.gz",
        license="CC BY, CC BY-SA or CC0, per paper",
        tokens=4.9e9,
    ),  # one epoch; the card's 29.3B counts six repeats
}
