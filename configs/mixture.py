"""The training mixture that every full-size run shares: source -> share of the training tokens."""

MIXTURE = {
    "fineweb_edu": 0.80,  # educational web text
    "python": 0.07,
    "c": 0.03,
    "arxiv": 0.10,  # LaTeX and science; it does not lift common-sense benchmarks
}
