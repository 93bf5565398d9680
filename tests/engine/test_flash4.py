"""FlashAttention 4 without a GPU: the document boundaries that its kernel gets, and when it is refused.

A document is a sample, or the padding of a row. tests/gpu runs the kernel.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

from rl_actors import ModelConfig, TrainerConfig
from rl_actors.engine import flash4
from rl_actors.engine.flash4 import BOUNDARIES_MULTIPLE, CONFIGS, documents


def test_documents_begin_where_samples_and_padding_begin():
    # Spans are (sample, row, start, end). Five positions of padding follow the samples of the first row.
    spans = [(7, 0, 0, 30), (3, 0, 30, 95), (0, 1, 0, 100)]
    made = documents(num_rows=2, row_length=100, spans=spans)
    assert made.cu_seq_q.dtype == torch.int32
    assert made.cu_seq_q[:5].tolist() == [0, 30, 95, 100, 200]
    # Empty documents fill the rest of the tensor. Its length is a multiple of BOUNDARIES_MULTIPLE, so that few shapes
    # occur.
    assert made.cu_seq_q[5:].tolist() == [200] * (BOUNDARIES_MULTIPLE - 5)
    assert made.max_q == made.max_k == 100  # a bound that does not change with the samples


def test_an_empty_row_is_one_document():
    made = documents(num_rows=1, row_length=64, spans=[])
    assert made.cu_seq_q.unique().tolist() == [0, 64] and made.max_q == 64


def test_flash_attention_4_is_refused_in_float32_and_under_context_parallelism():
    config = TrainerConfig(model=ModelConfig(), attention="flash4")
    with pytest.raises(ValueError, match="attention='flash4' with compute_dtype='float32'"):
        config.validate()
    config.compute_dtype = "bfloat16"
    config.validate()
    config.parallelism.context_parallel_degree = 2
    with pytest.raises(ValueError, match="context_parallel_degree=2 with attention="):
        config.validate()


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    yield
    restore_flash_attention_impl(_raise_warn=False)


def test_flash_attention_4_replaces_torchs_attention_and_returns_the_outputs_that_torch_expects(hopper, monkeypatch):
    """A fake module replaces the package, because the package's kernels need a GPU. tests/gpu runs the real kernels."""
    interface = SimpleNamespace(
        _flash_attn_fwd=lambda *_, **__: tuple("abcde"), _flash_attn_bwd=lambda *_, **__: tuple("abc")
    )
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(interface=interface))
    for _ in range(2):  # as in a model of two blocks, each of which builds its attention
        CONFIGS["flash4"]().build()
        assert current_flash_attention_impl() == "FA4"
    assert flash4._flash_attn_fwd(1, causal=True) == ("a", "b") and flash4._flash_attn_bwd(1) == ("a", "b", "c")


def test_flash_attention_4_is_refused_without_its_package_and_on_an_older_gpu(hopper, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ValueError, match='attention="flash4" needs the package flash-attn-4'):
        CONFIGS["flash4"]().build()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(
        ValueError, match="capability 8.0; torch calls FlashAttention 4 only on 9.x and 10.x; attention="
    ):
        CONFIGS["flash4"]().build()
