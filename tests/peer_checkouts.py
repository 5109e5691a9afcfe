"""Small stand-ins with the interfaces of nanoGPT, nanochat and torchtitan, written for the tests; their own code is never here.

The files of a made-up checkout import what they hold from here."""

from dataclasses import make_dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


def config(**defaults):
    return make_dataclass("Config", [(name, type(default), default) for name, default in defaults.items()])


NanoConfig = config(block_size=1024, vocab_size=50304, n_layer=12, n_head=12, n_embd=768, dropout=0.1, bias=True)
ChatConfig = config(sequence_len=2048, vocab_size=32768, n_layer=12, n_head=6, n_kv_head=6, n_embd=768, window_pattern="SSSL")
TitanArgs = config(dim=4096, n_layers=32, n_heads=32, vocab_size=128256, multiple_of=256, max_seq_len=131072)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.w = nn.Linear(width, width, bias=False)

    def forward(self, h):
        return h + self.w(h)


class Titan(nn.Module):
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


class Nano(Titan):
    def __init__(self, config):
        super().__init__(TitanArgs(config.n_embd, config.n_layer, vocab_size=config.vocab_size))
        assert not (config.bias or config.dropout)
        self.tok_embeddings.weight = self.output.weight

    def forward(self, x, targets=None):
        logits = super().forward(x)
        return logits, loss_of(logits, targets)

    def configure_optimizers(self, *asked):
        self.asked = asked
        return torch.optim.SGD(self.parameters(), lr=asked[1])


class ChatLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Float8Linear(ChatLinear):
    pass


def convert_to_float8_training(module, *, config=None, module_filter_fn=None):
    assert config == "tensorwise"
    for name, child in list(module.named_modules()):
        if isinstance(child, nn.Linear) and module_filter_fn(child, name):
            child.__class__ = Float8Linear


class Chat(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, V, L = config.n_embd, config.vocab_size, config.n_layer
        self.wte, self.value_embeds = nn.Embedding(V, C), nn.Embedding(V, C)
        self.c_fc = nn.ModuleList(ChatLinear(C, 4 * C, bias=False) for _ in range(L))
        self.c_proj = nn.ModuleList(ChatLinear(4 * C, C, bias=False) for _ in range(L))
        self.gate, self.lm_head = ChatLinear(12, 1, bias=False), ChatLinear(C, V, bias=False)
        self.lambdas = nn.Parameter(torch.zeros(L))

    @torch.no_grad()
    def init_weights(self):
        for name, p in self.named_parameters():
            nn.init.normal_(p, std=0.0 if "c_proj" in name or name == "lambdas" else 0.02)

    def forward(self, x, targets=None):
        h = (self.wte(x) + self.value_embeds(x)).bfloat16()
        h = h * (1 + self.gate(h[..., :12]))
        for scale, up, down in zip(self.lambdas, self.c_fc, self.c_proj, strict=True):
            h = h + (1 + scale.to(h.dtype)) * down(F.relu(up(h)).square())
        return loss_of(self.lm_head(h), targets)

    def setup_optimizer(self, **rates):
        self.asked = rates
        return torch.optim.SGD(self.parameters(), lr=0.1)


FILES = {
    "nanogpt": {"model.py": "from tests.peer_checkouts import Nano as GPT, NanoConfig as GPTConfig\n"},
    "nanochat": {
        "nanochat/__init__.py": "", "nanochat/optim.py": "", "nanochat/flash_attention.py": "USE_FA3 = False\n",
        "nanochat/common.py": "import os\nassert os.environ['NANOCHAT_DTYPE'] == 'bfloat16'\n",
        "nanochat/fp8.py": "from tests.peer_checkouts import convert_to_float8_training\n"
                           "class Float8LinearConfig:\n    from_recipe_name = str\n",
        "nanochat/gpt.py": "import nanochat.common\n"
                           "from tests.peer_checkouts import Chat as GPT, ChatConfig as GPTConfig, ChatLinear as Linear\n"},
    "torchtitan": {
        **{f"torchtitan/{room}__init__.py": "" for room in ("", "models/", "models/llama3/", "models/llama3/model/")},
        "torchtitan/models/llama3/model/args.py": "from tests.peer_checkouts import TitanArgs as TransformerModelArgs\n",
        "torchtitan/models/llama3/model/model.py": "import torchtitan.models.llama3.model.args\n"
                                                   "from tests.peer_checkouts import Titan as Transformer\n"},
}


def make(peer, folder):
    for name, text in FILES[peer].items():
        (path := folder / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)
