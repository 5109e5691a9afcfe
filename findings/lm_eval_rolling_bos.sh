#!/usr/bin/env bash
# lm_eval --model hf puts two begin tokens before a text in rolling log-likelihoods, and scores the second of them.
#
# lm-eval 0.4.13 with transformers 5.24.0 and torch 2.13.0, on a CPU. loglikelihood_rolling(), behind word_perplexity and
# bits_per_byte, puts the begin token before the text's tokens, with which a tokenizer that adds one (Llama's, Gemma's)
# begins already. Each text's score so includes the begin token's own log-likelihood after itself, which no model was
# trained on, and its words follow two begin tokens. Perplexities of such a model cannot be compared with those of a
# tokenizer that adds none. loglikelihood() with an empty context has one begin token and does not score it.
#
# What is run: a random Llama (2 layers, width 32), its tokenizer with and without a begin token, a text of four words.
#
# Output seen (numbers depend on the random weights):
#   one begin token, four words scored:       -26.5827
#   two begin tokens, the second scored too:  -30.8185
#   loglikelihood_rolling:                    -30.8185
#   the same, add_bos_token=False:            -26.5827
#   loglikelihood, empty context:             -26.5827
#
# Remedy: --model_args add_bos_token=False for these tasks. It would take the token from contexts of others.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.24.0 accelerate==1.15.0 lm_eval==0.4.13

cd "$work"
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
cat > rolling.py <<'PY'
import sys
from types import SimpleNamespace

import torch
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BEGIN, WORDS = 0, [2, 3, 4, 5]
TEXT = "w2 w3 w4 w5"
torch.manual_seed(0)
vocabulary = {"<begin>": BEGIN, "<end>": 1} | {f"w{i}": i for i in range(2, 64)}
rules = Tokenizer(models.WordLevel(vocabulary, "<end>"))
rules.pre_tokenizer = pre_tokenizers.Whitespace()
rules.post_processor = processors.TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", BEGIN)])
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=rules, bos_token="<begin>", eos_token="<end>", pad_token="<end>"
)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, 0.0, 0.6)


@torch.no_grad()
def directly(tokens: list[int], n_scored: int) -> float:
    """Log-likelihood of the last n_scored tokens."""
    log_p = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return sum(log_p[i - 1, tokens[i]].item() for i in range(len(tokens) - n_scored, len(tokens)))


def lm(**settings) -> HFLM:
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu", **settings)


text, empty = SimpleNamespace(args=(TEXT,)), SimpleNamespace(args=("", TEXT))
scores = {
    "one begin token, four words scored:": directly([BEGIN, *WORDS], 4),
    "two begin tokens, the second scored too:": directly([BEGIN, BEGIN, *WORDS], 5),
    "loglikelihood_rolling:": lm().loglikelihood_rolling([text], disable_tqdm=True)[0],
    "the same, add_bos_token=False:": lm(add_bos_token=False).loglikelihood_rolling([text], disable_tqdm=True)[0],
    "loglikelihood, empty context:": lm().loglikelihood([empty], disable_tqdm=True)[0][0],
}
for name, score in scores.items():
    print(f"{name:41} {score:.4f}")
one, two, rolling, without, conditional = (round(score, 3) for score in scores.values())
sys.exit(0 if rolling == two != one and one == without == conditional else 1)
PY
"$work/venv/bin/python" rolling.py 2> log || { code=$?; tail -n 5 log; exit "$code"; }
