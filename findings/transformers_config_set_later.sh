#!/usr/bin/env bash
# transformers' LlamaConfig ignores rope_theta once it exists, and a changed number of heads makes another attention.
#
# transformers 5.24.0 with torch 2.13.0. A config computes some of its settings from others when it is built, and never
# again. So a config that is derived from another by assignment, as in a sweep, is not the config of these values:
# 1. rope_theta lives in rope_parameters. config.rope_theta = 5e5 is a new attribute that nothing reads; the saved
#    config.json names both values, and loading it takes the old one. from_pretrained(.., rope_theta=5e5) is the same.
#    As an argument of LlamaConfig() it works.
# 2. num_attention_heads = 8 after 4: head_dim and num_key_value_heads stay. Queries are twice as wide, and two heads
#    share a key. hidden_size = 128 after 64 keeps heads of 16 of 64 / 4, so attention stays as narrow as before.
# No error, no warning; the number of parameters is another.
#
# What is run: a Llama of width 64 with 4 heads, changed by assignment and by an argument.
#
# Output seen:
#   rope_theta=5e5, argument            second frequency 0.1939
#   rope_theta=5e5, assigned            second frequency 0.3162
#   the same, saved and loaded          second frequency 0.3162, config.json has rope_theta 500000.0 and 10000.0
#   from_pretrained(rope_theta=5e5)     second frequency 0.3162
#   num_attention_heads=8, argument     65856 parameters, heads of 8, 8 of keys
#   num_attention_heads=8, assigned     82240 parameters, heads of 16, 4 of keys
#   hidden_size=128, argument           197248 parameters, heads of 32, 4 of keys
#   hidden_size=128, assigned           131712 parameters, heads of 16, 4 of keys
#
# Remedy: build a config by arguments, LlamaConfig(**{**old.to_dict(), ..}) without the settings that follow from others.
# Ends with 0 where it behaves so and with 1 where it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.24.0

cd "$work"
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
cat > configs.py <<'PY'
import json
import sys
from pathlib import Path

from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)


def assigned(**changes) -> LlamaConfig:
    config = LlamaConfig(**SIZES)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def argument(**changes) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, **changes})


def frequency(name: str, config: LlamaConfig, more: str = "") -> float:
    value = LlamaForCausalLM(config).model.rotary_emb.inv_freq[1].item()
    print(f"{name:35} second frequency {value:.4f}{more}")
    return value


def size(name: str, config: LlamaConfig) -> int:
    n = LlamaForCausalLM(config).num_parameters()
    print(f"{name:35} {n} parameters, heads of {config.head_dim}, {config.num_key_value_heads} of keys")
    return n


assigned(rope_theta=5e5).save_pretrained("saved")
saved = json.loads(Path("saved/config.json").read_text())
both = f", config.json has rope_theta {saved['rope_theta']} and {saved['rope_parameters']['rope_theta']}"
right = frequency("rope_theta=5e5, argument", argument(rope_theta=5e5))
plain = LlamaForCausalLM(argument()).model.rotary_emb.inv_freq[1].item()
ignored = [
    frequency("rope_theta=5e5, assigned", assigned(rope_theta=5e5)),
    frequency("the same, saved and loaded", AutoConfig.from_pretrained("saved"), both),
]
argument().save_pretrained("plain")
loaded = AutoConfig.from_pretrained("plain", rope_theta=5e5)
ignored.append(frequency("from_pretrained(rope_theta=5e5)", loaded))
sizes = []
for key, value in (("num_attention_heads", 8), ("hidden_size", 128)):
    sizes.append(size(f"{key}={value}, argument", argument(**{key: value})))
    sizes.append(size(f"{key}={value}, assigned", assigned(**{key: value})))
is_ignored = set(ignored) == {plain} and right != plain
sys.exit(0 if is_ignored and sizes == [65856, 82240, 197248, 131712] else 1)
PY
"$work/venv/bin/python" configs.py 2> log || { code=$?; tail -n 5 log; exit "$code"; }
