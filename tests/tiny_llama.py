"""A tiny Llama made on the spot by transformers, random, with a tokenizer of its own: what the tests import."""

import torch

from tests.text_files import BEGINS, write_tokenizer

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
    write_tokenizer(folder, vocab=400, post_processor=BEGINS)
    return folder


def read_llama(folder):
    """transformers' own reading in fp32, its weights moved to aligned memory: a product with one row depends on that."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for p in model.parameters():
        p.data = p.data.clone()
    return model
