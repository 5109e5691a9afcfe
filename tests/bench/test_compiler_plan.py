"""bench.compiler_plan; whole plans against docs/speed.md: tests/soak.py."""

import pytest

from tests.conftest import process

CHECK = """
from bench.compiler_plan import pretend_h100
from fp8.producers import check_are_known_blocks
from model import GPT, GPTConfig

pretend_h100()
check_are_known_blocks(GPT.on_meta(GPTConfig(n_layer=2, n_head=2, n_embd=32, n_ffn=48, n_ctx=16)))
"""


def test_blocks_of_producers_are_known_where_attention_is_a_stand_in():
    """The plan of fp8.scaling=bounded computes small blocks by value; the rest is never run."""
    pytest.importorskip("triton")
    checked = process("-c", CHECK)
    assert checked.returncode == 0, checked.stderr
