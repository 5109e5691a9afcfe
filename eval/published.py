"""Scores that others have published, each with its source, harness and shots.

They are for orientation and stand apart from our own: harnesses differ in prompts, in how answers are normalised by length
and in shots, so that the same model moves by several points between two of them. Only what could be read in the named
source is here, as it is written there; a public model whose weights are at hand is better scored by our own command
(eval/public.py).
"""

from dataclasses import dataclass

LM_EVAL = "lm-eval"
PYTHIA = "github.com/EleutherAI/pythia, evals/, step 143000"
TINY_LLAMA = "github.com/jzhang38/TinyLlama, EVAL.md"
NANOCHAT = "github.com/karpathy/nanochat, dev/estimate_gpt3_core.ipynb"
BUILD_NANOGPT = "github.com/karpathy/build-nanogpt, hellaswag.py"
GPT2023 = "huggingface.co/crumb/gpt2023"
MESH = "github.com/kingoflolz/mesh-transformer-jax, README.md"
LINGUA = "github.com/facebookresearch/lingua, README.md"
TORCHAO = "github.com/pytorch/ao/pull/3394"
NORM = "acc_norm; acc where a task has no norm"


@dataclass(frozen=True, kw_only=True)
class Published:
    """One model's scores: accuracies in per cent, perplexities (a task named so) as they are."""
    model: str
    metric: str
    shots: int
    harness: str
    source: str
    scores: dict[str, float]


def published() -> list[Published]:
    """All of them, by model and size."""
    dclm, lm_eval = {"harness": "DCLM's", "metric": "acc", "source": NANOCHAT}, {"harness": LM_EVAL, "shots": 0}
    pythia, tiny = lm_eval | {"source": PYTHIA}, lm_eval | {"metric": NORM, "source": TINY_LLAMA}
    return [
        Published(model="GPT-2 124M", metric="acc", source=GPT2023, **lm_eval, scores={
            "lambada_openai": 32.56, "lambada_openai perplexity": 40.06, "piqa": 62.89, "sciq": 75.0, "winogrande": 51.61}),
        Published(model="GPT-2 124M", metric="acc_norm", source=BUILD_NANOGPT, **lm_eval, scores={"hellaswag": 31.14}),
        Published(model="GPT-2 124M", shots=0, **dclm, scores={"hellaswag": 30.9, "lambada_openai": 32.3}),
        Published(model="GPT-2 124M", shots=10, **dclm, scores={
            "hellaswag": 30.8, "piqa": 62.3, "arc_easy": 41.2, "arc_challenge": 22.2}),
        Published(model="GPT-2 355M", shots=0, **dclm, scores={"hellaswag": 39.0, "lambada_openai": 42.6}),
        Published(model="GPT-2 355M", shots=10, **dclm, scores={
            "hellaswag": 39.5, "piqa": 67.0, "arc_easy": 48.0, "arc_challenge": 26.2}),
        Published(model="GPT-2 774M", shots=0, **dclm, scores={"hellaswag": 44.0, "lambada_openai": 48.8}),
        Published(model="GPT-2 774M", shots=10, **dclm, scores={
            "hellaswag": 44.4, "piqa": 69.8, "arc_easy": 53.5, "arc_challenge": 26.4}),
        Published(model="GPT-2 1.5B", metric="not stated", source=MESH, **lm_eval, scores={
            "lambada_openai": 51.21, "lambada_openai perplexity": 10.63, "hellaswag": 50.9, "piqa": 70.8, "winogrande": 59.4}),
        Published(model="GPT-2 1.5B", metric="acc_norm", source=BUILD_NANOGPT, **lm_eval, scores={"hellaswag": 50.89}),
        Published(model="GPT-2 1.5B", shots=0, **dclm, scores={"hellaswag": 50.2, "lambada_openai": 52.3}),
        Published(model="GPT-2 1.5B", shots=10, **dclm, scores={
            "hellaswag": 51.2, "piqa": 72.5, "arc_easy": 59.5, "arc_challenge": 29.9}),
        Published(model="Pythia 160M", metric="acc", **pythia, scores={
            "lambada_openai": 32.8, "lambada_openai perplexity": 38.06, "piqa": 62.7, "arc_easy": 43.5, "arc_challenge": 18.8,
            "sciq": 74.1, "winogrande": 53.1}),
        Published(model="Pythia 160M", metric="acc_norm", **pythia, scores={
            "piqa": 61.6, "arc_easy": 39.7, "arc_challenge": 23.3, "sciq": 66.8}),
        Published(model="Pythia 410M", metric="acc", **pythia, scores={
            "lambada_openai": 51.6, "lambada_openai perplexity": 10.83, "piqa": 66.8, "arc_easy": 52.1, "arc_challenge": 21.3,
            "sciq": 81.1, "winogrande": 53.7}),
        Published(model="Pythia 410M", metric="acc_norm", **pythia, scores={
            "piqa": 67.1, "arc_easy": 45.8, "arc_challenge": 24.3, "sciq": 72.1}),
        Published(model="Pythia 1.0B", **tiny, scores={
            "hellaswag": 47.16, "openbookqa": 31.40, "winogrande": 53.43, "arc_challenge": 27.05, "arc_easy": 48.99,
            "boolq": 60.83, "piqa": 69.21}),
        Published(model="Pythia 1.4B", metric="acc", **pythia, scores={
            "lambada_openai": 61.6, "lambada_openai perplexity": 6.09, "piqa": 70.9, "arc_easy": 60.7, "arc_challenge": 26.0,
            "sciq": 86.5, "winogrande": 57.3}),
        Published(model="Pythia 1.4B", metric="acc_norm", **pythia, scores={
            "piqa": 71.1, "arc_easy": 53.9, "arc_challenge": 28.6, "sciq": 79.4}),
        Published(model="TinyLlama 1.1B, 1.0T tokens", **tiny, scores={
            "hellaswag": 52.54, "openbookqa": 33.40, "winogrande": 55.96, "arc_challenge": 27.82, "arc_easy": 52.36,
            "boolq": 59.54, "piqa": 69.91}),
        Published(model="Lingua 1B, 60B tokens", metric="not stated", shots=0, harness="its own", source=LINGUA, scores={
            "hellaswag": 63.62, "openbookqa": 37.40, "winogrande": 61.64, "arc_challenge": 36.48, "arc_easy": 62.83,
            "boolq": 62.57, "piqa": 75.14}),
        Published(model="Llama 3.1 8B, BF16", metric="acc", source=TORCHAO, **lm_eval, scores={
            "wikitext word_perplexity": 7.55, "winogrande": 74.3}),
        Published(model="Llama 3.1 8B, FP8 inference (rowwise)", metric="acc", source=TORCHAO, **lm_eval, scores={
            "wikitext word_perplexity": 7.62, "winogrande": 73.7}),
    ]
