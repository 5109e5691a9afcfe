"""Small stand-ins with the interfaces of nanoGPT, nanochat and torchtitan, written for the tests; their own code is never here.

The files of a made-up checkout import what they hold from here; a config is a SimpleNamespace of what the benchmark gives."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Titan(nn.Module):
    linear = nn.Linear

    def __init__(self, config):
        super().__init__()
        C, V, L = (getattr(config, "dim", None) or config.n_embd, config.vocab_size,
                   getattr(config, "n_layers", None) or config.n_layer)
        self.embedding = nn.Embedding(V, C)
        self.layers = nn.ModuleDict({str(i): self.linear(C, C, bias=False) for i in range(L)})
        self.output = self.linear(C, V, bias=False)

    def init_weights(self, buffer_device=None):
        for p in self.parameters():
            p.uniform_(-0.02, 0.02)         # in place: theirs wants no_grad()

    def forward(self, tokens):
        h = self.embedding(tokens)
        for layer in self.layers.values():
            h = h + layer(h)
        return self.output(h)


class Nano(Titan):
    def __init__(self, config):
        super().__init__(config)
        assert not (config.bias or config.dropout)
        self.embedding.weight = self.output.weight

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


class Chat(Titan):
    linear = ChatLinear

    def __init__(self, config):
        super().__init__(config)
        self.gate = ChatLinear(12, 1, bias=False)
        self.scale = nn.Parameter(torch.zeros(1))

    @torch.no_grad()
    def init_weights(self):
        for name, p in self.named_parameters():
            nn.init.normal_(p, std=0.0 if "layers" in name or name == "scale" else 0.02)

    def forward(self, x, targets=None):
        h = self.embedding(x).bfloat16()
        h = h * (1 + self.gate(h[..., :12])) * (1 + self.scale.bfloat16())
        for layer in self.layers.values():
            h = h + layer(h)
        return loss_of(self.output(h), targets)

    def setup_optimizer(self, **rates):
        self.asked = rates
        return torch.optim.SGD(self.parameters(), lr=0.1)


CONFIG, HERE = "from types import SimpleNamespace as ", "from tests.peer_checkouts import "
LLAMA = "torchtitan/models/llama3/model/"
FILES = {
    "nanogpt": {"model.py": f"{CONFIG}GPTConfig\n{HERE}Nano as GPT\n"},
    "nanochat": {
        "nanochat/__init__.py": "", "nanochat/optim.py": "", "nanochat/flash_attention.py": "USE_FA3 = False\n",
        "nanochat/common.py": "import os\nassert os.environ['NANOCHAT_DTYPE'] == 'bfloat16'\n",
        "nanochat/fp8.py": f"{HERE}convert_to_float8_training\nclass Float8LinearConfig:\n    from_recipe_name = str\n",
        "nanochat/gpt.py": f"import nanochat.common\n{CONFIG}GPTConfig\n{HERE}Chat as GPT, ChatLinear as Linear\n"},
    "torchtitan": {f"{LLAMA}args.py": f"{CONFIG}TransformerModelArgs\n", f"{LLAMA}model.py": f"{HERE}Titan as Transformer\n"},
}


def make(peer, folder):
    for name, text in FILES[peer].items():
        (path := folder / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)
