"""Write the model card of an exported run: what it is, what made it, how well it does, what it cannot do.

Every number comes from the run's own files: config.json, summary.json, eval/*.json, metrics.jsonl and the index.json of each
source, as far as they are there. What they hold is data: it is escaped, and a file that cannot be read is left out by name.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path

from eval.hf_layout import hf_config
from runtime.checkpoint import origin_of
from runtime.config import Config
from runtime.tokenizer import Tokenizer

FIGURE = "training.png"
HUB_NAME, LICENSE = r"[\w.-]+/[\w.-]+", r"[a-z0-9][a-z0-9.-]*"
COMMIT = r"[0-9a-f]{40}"        # prepare/ writes a Hub's data set with the commit it was read at


def write_model_card(folder: Path, run_dir: Path, config: Config, manifest: dict, tokenizer: Tokenizer, dtype: str, recipe: str,
                     float8: list[str], license: str) -> None:
    """README.md, and training.png where the run has metrics. `float8`: our Linears that `recipe` stored so.

    Without a choice of the user's the licence is that of the model that these weights come from, where one is known.
    """
    notes: list[str] = []
    imported = _table(manifest["state"].get("imported"))
    origin = _table(origin_of(manifest))
    summary = {} if imported else _read(run_dir / "summary.json", notes)
    if summary and summary.get("steps") != manifest["step"]:
        notes.append(f"summary.json tells of step {summary.get('steps')}, the weights are of step {manifest['step']}: what it "
                     f"tells is missing here")
        summary = {}
    sources = {name: _read(Path(config.data.dir) / name / "index.json", notes)
               for name in ([] if imported else sorted(config.data.mixture))}
    if license == "other" and re.fullmatch(LICENSE, str(origin.get("license"))):
        license = origin["license"]
    is_drawn = not imported and _draw(run_dir, folder / FIGURE, notes)
    parts = [_front_matter(config, sources, origin, license, bool(float8)), f"# {_cell(config.run)}",
             _intro(config, manifest, sources, imported, origin), _use(tokenizer, imported, float8), _model(config, dtype)]
    if origin:
        parts.append(_origin(origin))
    if not imported:
        parts += [_data(config, sources, origin), _training(config, manifest, summary, sources, is_drawn)]
    parts += [_precision(config, summary, dtype, recipe, float8, imported),
              _scores(run_dir, summary, manifest["step"], notes), _limits(config, origin, license),
              *(["\n".join(f"- {_cell(note)}" for note in notes)] if notes else [])]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _front_matter(config: Config, sources: dict, origin: dict, license: str, is_float8: bool) -> str:
    """The YAML that the Hub reads; JSON's strings are YAML's."""
    names = sorted({s["dataset"] for s in sources.values() if re.fullmatch(HUB_NAME, str(s.get("dataset"))) and
                    re.fullmatch(COMMIT, str(s.get("revision")))})
    tags = ["nanofp8", *(["fp8"] if config.fp8.recipe != "off" else []), *(["torchao"] if is_float8 else [])]
    lines = [f"license: {license}", *(["license_name: not-chosen"] if license == "other" else []), "library_name: transformers",
             "pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in tags),
             *([f"base_model: {json.dumps(origin['model'])}"] if re.fullmatch(HUB_NAME, str(origin.get("model"))) else []),
             *(["datasets:", *(f"- {json.dumps(name)}" for name in names)] if names else [])]
    return "\n".join(["---", *lines, "---"])


def _intro(config: Config, manifest: dict, sources: dict, imported: dict, origin: dict) -> str:
    count, step, (parent, begin) = config.model.params_total, manifest["step"], config.parent or (None, 0)
    if imported:
        return f"A language model of {_count(count)} parameters, imported into nanoFP8 and not trained there."
    began = (f"trained from the weights of {_cell(parent)} at step {begin:,}" if begin else
             f"trained on from the weights of {_cell(_name(origin))}, an imported model," if origin else "trained from scratch")
    steps = (f"to step {step:,}, {step - begin:,} steps of {config.data.tokens_per_step:,} tokens" if begin else
             f"on {_count(step * config.data.tokens_per_step)} tokens ({step:,} steps of {config.data.tokens_per_step:,})")
    kind = ("It was tuned on prompts and responses." if _masked(sources) else
            f"It was trained on plain text after {_cell(_name(origin))}." if origin else
            "It is a base model: it continues text, it was not tuned to follow instructions.")
    return f"A language model of {_count(count)} parameters, {began} {steps} with nanoFP8. {kind}"


def _use(tokenizer: Tokenizer, imported: dict, float8: list[str]) -> str:
    begin = " then ".join(f"{_cell(tokenizer.decode([i]))} (`{role}`)" for i, role in
                          zip(tokenizer.prefix, ("eos", "bos"), strict=False))
    adds = f"the tokenizer adds {'the last of them' if tokenizer.adds_start else 'none of them'} by itself"
    training = "" if imported else (f"\n\nIn training each document began after {begin}; {adds}. Text that spells a special "
                                    "token becomes that token; in the training data it stayed text.")
    needs = "\n\nThe float8 weights need the package torchao; they are fast on GPUs with FP8 units alone." if float8 else ""
    return f"""## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIR")      # this folder
tokenizer = AutoTokenizer.from_pretrained("DIR")
ids = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))
```{training}{needs}"""


def _model(config: Config, dtype: str) -> str:
    m, about = config.model, hf_config(config.model, dtype)
    rows = [("architecture", about["architectures"][0]), ("parameters", f"{m.params_total:,}"), ("layers", m.n_layer),
            ("width", m.n_embd), ("heads", f"{m.n_head} of {m.head_size} channels, {m.kv_heads} for keys and values"),
            ("feed-forward width", m.n_ffn), ("context", f"{m.n_ctx:,} tokens"),
            ("vocabulary", f"{m.vocab_padded:,} rows" + (f", {m.vocab_size:,} of them used" if m.vocab_size < m.vocab_padded
                                                         else "")),
            ("head", "tied to the embedding" if m.tied else "its own matrix"),
            ("RoPE", f"base {m.rope_theta:g}" + (f", Llama 3's stretch by {m.rope_factor:g}" if m.rope_factor else ""))]
    return "\n".join(["## Model", "", "| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in rows)])


def _origin(facts: dict) -> str:
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in
            ({**facts, "files": "SHA-256", **_table(facts.get("files"))}).items() if value is not None]
    return "\n".join(["## Where it comes from", "", "| | |", "|---|---|", *rows])


def _data(config: Config, sources: dict, origin: dict) -> str:
    total = sum(config.data.mixture.values())
    before = (f" These came after what {_cell(_name(origin))} was trained on before it was imported, which is not known here."
              if origin else "")
    rows = []
    for name, index in sources.items():
        seen = [_cell(index.get(key, "not known")) for key in ("dataset", "revision", "license")]
        rows.append(f"| {_cell(name)} | {config.data.mixture[name] / total:.1%} | {' | '.join(seen)} |")
    return "\n".join(["## Data", "", f"Tokenizer: {_cell(_tokenizer(config))}. Shares are of the training tokens.{before}", "",
                      "| source | share | data set | revision | licence |", "|---|---:|---|---|---|", *rows])


def _training(config: Config, manifest: dict, summary: dict, sources: dict, is_drawn: bool) -> str:
    o, lines = config.optim, []
    lines.append(f"AdamW (betas {o.beta1:g}, {o.beta2:g}; weight decay {o.weight_decay:g}; gradients clipped at {o.clip:g}), "
                 f"peak learning rate {o.lr:g}, {o.schedule} schedule with {o.warmup_share:.0%} warm-up, "
                 f"{config.data.tokens_per_step:,} tokens a step, step {manifest['step']:,} of {config.total_steps:,}.")
    if (wall := _number(summary.get("wall_s"))) is not None:
        speed = _number(summary.get("tok_per_s_median"))
        lines.append(f"Trained on {_cell(summary.get('n_gpu'))} x {_cell(summary.get('device'))} in " +
                     (f"{wall / 3600:.2f} hours" if wall >= 3600 else f"{wall / 60:.1f} minutes") +
                     (f" at {speed:,.0f} tokens/s (median)" if speed is not None else "") +
                     f"; code at commit {_cell(summary.get('git_commit'))}.")
    rows = [f"| {_cell(name)} | {loss:.4f} | " + (f"{bits:.4f} |" if (bits := _number(s.get("bpb_bf16"))) is not None else "- |")
            for name, s in _table(summary.get("sources")).items()
            if isinstance(s, dict) and (loss := _number(s.get("loss_bf16"))) is not None]
    if rows:
        lines += ["| validation | nats per token | bits per byte |\n|---|---:|---:|\n" + "\n".join(rows)]
        if masked := _masked(sources):
            lines.append(f"Of {', '.join(map(_cell, masked))} the losses, in training and here, count the responses alone.")
    return "\n\n".join(["## Training", *lines, *([f"![Training curves]({FIGURE})"] if is_drawn else [])])


def _precision(config: Config, summary: dict, dtype: str, recipe: str, float8: list[str], imported: dict) -> str:
    made = _table(summary.get("precision"))
    converted, kept = made.get("layers_converted"), _table(made.get("layers_skipped"))
    lines = []
    if not imported:
        lines.append("Trained in BF16 with fp32 weights." if config.fp8.recipe == "off" else
                     f"Trained with the matmuls of these Linears in FP8, recipe `{config.fp8.recipe}`; all else in BF16, with "
                     f"fp32 weights, sums of gradients and optimizer.")
    if isinstance(converted, list) and converted:
        reasons: dict[str, list[str]] = {}
        for name, reason in kept.items():
            reasons.setdefault(str(reason), []).append(name)
        lines.append("\n".join([f"- FP8: {_groups(converted)}",
                                *(f"- BF16, {_cell(reason)}: {_groups(names)}" for reason, names in reasons.items())]))
    trained, plain = _number(summary.get("loss_as_trained")), _number(summary.get("loss_bf16"))
    if config.fp8.recipe != "off" and None not in (trained, plain):
        lines.append(f"Validation loss through the FP8 matmuls {trained:.4f}, through BF16 ones from the same weights "
                     f"{plain:.4f} nats per token.")
    lines.append(f"The weights here: {_groups(float8)} as float8 E4M3 with scales by `{recipe}`, all else BF16." if float8 else
                 "The weights here: " + ("fp32, as trained." if dtype == "fp32" else "the fp32 weights rounded to BF16."))
    return "\n\n".join(["## Precision", *lines])


def _scores(run_dir: Path, summary: dict, step: int, notes: list[str]) -> str:
    """The table of what the harness wrote of these weights; a whole task before a part of it, the newest of each setting."""
    records = [{"tasks": summary.get("eval")}]
    for path in sorted((run_dir / "eval").glob("*.json")):
        record = _read(path, notes)
        if record.get("step", step) == step:
            records.append(record)
        else:
            notes.append(f"eval/{path.name} is of step {record['step']}, the weights are of step {step}: its scores are missing "
                         f"here")
    rows: dict[tuple, tuple] = {}
    for record in sorted(records, key=lambda record: str(record.get("time", ""))):
        for task, row in _table(record.get("tasks")).items():
            row = _table(row)
            if row.get("step", step) != step:
                continue
            limit = record.get("limit") or row.get("limit")
            setting = ", ".join([*([f"FP8 matmuls, {record['fp8']}"] if record.get("fp8") not in (None, "off") else []),
                                 *([str(record["dtype"])] if record.get("dtype") not in (None, "bfloat16") else [])])
            for metric in (key for key in row if f"{key}_se" in row and _number(row[key]) is not None):
                key = (setting, task, metric)
                if key not in rows or not limit or rows[key][-1]:
                    numbers = (_number(row.get(name)) for name in (metric, f"{metric}_se", "chance"))
                    rows[key] = (*numbers, row.get("n"), limit)
    if not rows:
        return "## Scores\n\nNot scored: `python -m eval.harness out/RUN --tasks core` does."
    lines = ["| task | metric | score | standard error | chance | documents |", "|---|---|---:|---:|---:|---|"]
    for (setting, task, metric), (value, error, chance, n, limit) in sorted(rows.items(), key=lambda item: item[0]):
        task += f" ({setting})" if setting else ""
        lines.append(f"| {_cell(task)} | {_cell(metric)} | {value:.4f} | {_or_dash(error, '.4f')} | "
                     f"{_or_dash(chance if metric.startswith('acc') else None, '.2f')} | "
                     f"{_cell(n)}{' (a part: limit=' + _cell(limit) + ')' if limit else ''} |")
    return "\n".join(["## Scores", "", "By `eval.harness` on lm-eval's tasks; scores of other tools may differ by more than "
                      "their errors.", "", *lines])


def _limits(config: Config, origin: dict, license: str) -> str:
    own = (f"That of the weights that it went on from ({_cell(_name(origin))}) holds for these too; it is not known here."
           if origin and license == "other" else "No licence was chosen for these weights. Those of the data are listed above."
           if license == "other" else "The licence is of these weights; the data keep theirs, listed above where they are known.")
    return f"""## Limits

- It may write what is false, offensive or private: nothing was done to prevent it, and bias was not measured.
- Its context is {config.model.n_ctx:,} tokens; longer inputs were never tried.
- What it was not trained on, other languages above all, it does badly.
- {own}"""


# -------------------------------------------------------------------------------------------------------------- helpers

def _draw(run_dir: Path, path: Path, notes: list[str]) -> bool:
    """The run's curves as a picture; False where there is nothing to draw."""
    from matplotlib import rc_context

    from runtime.cli import UserError
    from scaling.dynamics import draw, read_history
    from scaling.figures import RC, render
    try:
        history = read_history(run_dir)
    except UserError:
        notes.append("the run's metrics.jsonl holds no step, so there are no curves")
        return False
    with rc_context(RC):
        path.write_bytes(render(draw(history, run_dir.resolve().name), "png"))
    return True


def _read(path: Path, notes: list[str]) -> dict:
    """The JSON object in a file; an empty one, with a note, where there is none."""
    try:
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
        reason = "is no JSON object"
    except FileNotFoundError:
        reason = "is not there"
    except (OSError, ValueError, RecursionError):
        reason = "cannot be read"
    notes.append(f"{path.parent.name}/{path.name} {reason}: what it tells is missing here")
    return {}


def _masked(sources: dict) -> list[str]:
    """The sources of prompts and responses."""
    return [name for name, index in sources.items() if index.get("is_masked") is True]


def _name(origin: dict) -> str:
    """Of the imported model: the Hub's where it is known, else its folder's."""
    return str(origin.get("model") or origin.get("folder"))


def _table(value) -> dict:
    return value if isinstance(value, dict) else {}


def _number(value) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _cell(value) -> str:
    """Text from a file as one harmless cell of a Markdown table."""
    text = " ".join(str(value).split())
    text = text if len(text) <= 300 else f"{text[:300]} ..."
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))


def _count(n: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= size:
            return f"{n / size:.3g}{letter}"
    return str(n)


def _groups(names) -> str:
    """`layers.*.attn.qkv` (12), ..: names of Linears that differ in numbers alone, once."""
    return ", ".join(f"`{pattern}` ({n})" for pattern, n in
                     Counter(re.sub(r"\.\d+\.", ".*.", re.sub(r"[^\w.]", "", str(name))) for name in names).items())


def _tokenizer(config: Config) -> str:
    return config.data.tokenizer if config.data.tokenizer in ("gpt2", "byte") else "the imported model's own"
