"""Small stand-ins with the interfaces of nanoGPT and nanochat, written for the tests; their own code is never here."""

NANOGPT = '''
from dataclasses import dataclass
import torch
import torch.nn as nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.1
    bias: bool = True

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList(nn.Linear(config.n_embd, config.n_embd, bias=config.bias) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, x, targets=None):
        h = self.wte(x)
        for linear in self.h:
            h = h + linear(h)
        logits = self.head(h)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        self.asked = (weight_decay, learning_rate, betas, device_type)
        return torch.optim.SGD(self.parameters(), lr=learning_rate)
'''
COMMON = '''
import os
import torch
COMPUTE_DTYPE, REASON = {"bfloat16": torch.bfloat16}[os.environ["NANOCHAT_DTYPE"]], "asked"
'''
OPTIM = '''
import torch
class MuonAdamW(torch.optim.SGD):
    pass
'''
FP8 = '''
import torch.nn as nn
class Float8Linear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype))
class Float8LinearConfig:
    @staticmethod
    def from_recipe_name(name):
        return name
def convert_to_float8_training(module, *, config=None, module_filter_fn=None):
    assert config == "tensorwise"
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear) and module_filter_fn(child, name):
            child.__class__ = Float8Linear
'''
GPT_ROOM = '''
from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F
from nanochat.common import COMPUTE_DTYPE
from nanochat.optim import MuonAdamW

@dataclass
class GPTConfig:
    sequence_len: int = 2048
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    window_pattern: str = "SSSL"

class Linear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.n_embd
        self.wte = nn.Embedding(config.vocab_size, C)
        self.value_embeds = nn.Embedding(config.vocab_size, C)
        self.c_fc = nn.ModuleList(Linear(C, 4 * C, bias=False) for _ in range(config.n_layer))
        self.c_proj = nn.ModuleList(Linear(4 * C, C, bias=False) for _ in range(config.n_layer))
        self.gate = Linear(12, 1, bias=False)
        self.lm_head = Linear(C, config.vocab_size, bias=False)
        self.lambdas = nn.Parameter(torch.zeros(config.n_layer))

    @torch.no_grad()
    def init_weights(self):
        for p in self.parameters():
            nn.init.normal_(p, std=0.02)
        for linear in self.c_proj:
            nn.init.zeros_(linear.weight)
        nn.init.zeros_(self.lambdas)

    def forward(self, x, targets=None):
        h = (self.wte(x) + self.value_embeds(x)).to(COMPUTE_DTYPE)
        h = h * (1 + self.gate(h[..., :12]))
        for scale, up, down in zip(self.lambdas, self.c_fc, self.c_proj):
            h = h + (1 + scale.to(h.dtype)) * down(F.relu(up(h)).square())
        logits = self.lm_head(h).float()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def setup_optimizer(self, **rates):
        self.asked = rates
        return MuonAdamW(self.parameters(), lr=0.1)
'''
NANOCHAT = {"__init__": "", "common": COMMON, "optim": OPTIM, "flash_attention": "USE_FA3 = False", "fp8": FP8, "gpt": GPT_ROOM}


def nanogpt(folder):
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(NANOGPT)
    return str(folder)


def nanochat(folder):
    (folder / "nanochat").mkdir(parents=True)
    for room, text in NANOCHAT.items():
        (folder / "nanochat" / f"{room}.py").write_text(text)
    return str(folder)


TITAN_ARGS = '''
from dataclasses import dataclass

@dataclass
class TransformerModelArgs:
    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    vocab_size: int = 128256
    multiple_of: int = 256
    max_seq_len: int = 131072
'''
TITAN_MODEL = '''
import torch.nn as nn
from .args import TransformerModelArgs

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w = nn.Linear(dim, dim, bias=False)

    def forward(self, h):
        return h + self.w(h)

class Transformer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(i): Block(args.dim) for i in range(args.n_layers)})
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def init_weights(self, buffer_device=None):
        for p in self.parameters():
            p.uniform_(-0.02, 0.02)         # in place: theirs wants no_grad()

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(h)
'''


def torchtitan(folder):
    room = folder / "torchtitan" / "models" / "llama3" / "model"
    room.mkdir(parents=True)
    for package in (room, *room.parents[:3]):
        (package / "__init__.py").touch()
    (room / "args.py").write_text(TITAN_ARGS)
    (room / "model.py").write_text(TITAN_MODEL)
    return str(folder)
