"""A tiny Llama made on the spot by transformers, random, with a tokenizer of its own: what the tests import."""

import json

import torch

TEXT = ["The cat sat on the mat; the dog did not.", "One two three four five six seven eight nine ten.",
        "def f(x):\n    return x + 1\n", "\u00fcber den Wolken, \u65e5\u672c\u8a9e, caf\u00e9",
        "A question has an answer. Why? Because."] * 20
SIZES = {"vocab_size": 420, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False}
ROPE = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}


def make_llama(folder, *, rope=ROPE, architecture="Llama", dtype=torch.bfloat16, shard_size="50GB", seed=0, **sizes):
    """Write weights, config.json and a byte-level BPE with begin and end of text, as save_pretrained lays them out."""
    import transformers
    config = getattr(transformers, f"{architecture}Config")(**{**SIZES, "rope_parameters": dict(rope), **sizes}, head_dim=16)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder, bos="<|begin_of_text|>", eos="<|end_of_text|>"):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = [token for token in (bos, eos) if token]
    fast.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    if bos:
        fast.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, fast.token_to_id(bos))])
    fast.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": bos, "eos_token": eos} if bos else {"eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **roles}))


def read_llama(folder):
    """transformers' own reading in fp32, its weights moved to aligned memory: a product with one row depends on that."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for p in model.parameters():
        p.data = p.data.clone()
    return model
