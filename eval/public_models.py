"""Public models, by lm-eval's own class for transformers, with the tokenizer of their file."""

import os
import sys
from typing import Any

import torch

from eval.generation import OF_SAMPLING
from lib.errors import UserError, memory_error


def public_lm(name: str, device: torch.device, dtype: str, micro_batch: int) -> Any:
    """lm-eval's model for `name`, a repository of the Hub or a local folder in Hugging Face's
    format."""
    try:
        import transformers
        from lm_eval.models.huggingface import HFLM

        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()

        class PublicLM(HFLM):
            def _create_tokenizer(self, pretrained: Any, *args: Any, **kwargs: Any) -> None:
                super()._create_tokenizer(pretrained, *args, **kwargs)
                by_class: Any = self.tokenizer
                self.tokenizer: Any = _by_the_file(pretrained, by_class)

            def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list:
                # it mixes up windows of equal tokens whose scored parts begin elsewhere
                self.logits_cache = False
                scores = super().loglikelihood_rolling(requests, disable_tqdm)
                self.logits_cache = True
                return scores

        # lm-eval refuses a model's own code unless told otherwise. The softmax as ours: BF16 holds
        # a log-likelihood to 3 digits.
        lm = PublicLM(
            pretrained=os.path.expanduser(name),
            device=str(device),
            dtype=dtype,
            batch_size=micro_batch,
            use_safetensors=True,
            softmax_dtype="float32",
        )
        _decode_greedily(name, lm.model)
        return lm
    except Exception as error:
        # foreign code and foreign files: whatever it raises, name the model
        if memory_error(error):
            raise
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        raise UserError(
            f"hf:{name} could not be loaded ({type(error).__name__}: {reason}): it takes `pip"
            " install transformers accelerate` and safetensors, on the Hub or in a folder, without"
            " code of their own"
        ) from error


# What generation_config.json may say of the tokens, and what has no effect where nothing is drawn.
KEPT = {"bos_token_id", "eos_token_id", "pad_token_id"}
WITHOUT_EFFECT = OF_SAMPLING | {"do_sample", "max_length", "max_new_tokens", "use_cache"}


def _decode_greedily(name: str, model: Any) -> None:
    """Keep of the model's generation_config.json its special tokens alone, and say on stderr what
    else would have changed greedy answers: lm-eval leaves a repetition_penalty there in force."""
    import transformers

    config = model.generation_config
    tokens = {key: getattr(config, key) for key in KEPT}
    model.generation_config = transformers.GenerationConfig(**tokens)
    dropped = [
        f"{key}={value}"
        for key, value in sorted(config.to_diff_dict().items())
        if key not in KEPT | WITHOUT_EFFECT and not key.startswith(("_", "transformers_"))
    ]
    if dropped:
        print(
            f"hf:{name}: answers are greedy, without {', '.join(dropped)} of"
            " generation_config.json",
            file=sys.stderr,
        )


# Texts on which rules of splitting differ: runs of digits, of blanks and of line ends, a blank at
# the beginning and at the end, abbreviations, marks, letters of several scripts, a composed letter.
PROBE_TEXTS = (
    "In 2024 he'll pay $1,234,567.89 (50%) for it.",
    " one  two   three\tfour",
    "def f(x):\n    return x**2\n\n\n",
    "  NA\u00cfVE caf\u00e9 cafe\u0301 \u0434\u0430 \u65e5\u672c\u8a9e \U0001f642 ",
    "",
)


def _by_the_file(name: str, by_class: Any) -> Any:
    """The tokenizer of a public model: `by_class`, transformers' own, or where that makes other ids
    than the model's tokenizer.json, one that takes its rules from that file; says so on stderr.

    By the name of one of its own classes transformers 5 takes vocabulary and merges alone from
    tokenizer.json and splits text by the rules of the class.
    """
    import tokenizers
    import transformers
    from transformers.utils import cached_file

    path = cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if path is None:
        return by_class
    file = tokenizers.Tokenizer.from_file(path)
    file.no_truncation()
    file.no_padding()
    differing = [
        text
        for text in PROBE_TEXTS
        if by_class.encode(text, add_special_tokens=False)
        != file.encode(text, add_special_tokens=False).ids
    ]
    if not differing:
        return by_class
    print(
        f"hf:{name}: transformers' {type(by_class).__name__} makes other tokens than the model's"
        f" tokenizer.json, of {differing[0]!r} for one: scored with those of tokenizer.json",
        file=sys.stderr,
    )
    return transformers.PreTrainedTokenizerFast.from_pretrained(name)
