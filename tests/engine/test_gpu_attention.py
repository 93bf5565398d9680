"""What the kernels for ragged documents are told, which a CPU can make; tests/gpu runs them."""

import pytest
import torch

from rl_actors import ModelConfig, TrainerConfig
from rl_actors.engine.gpu_attention import BOUNDARIES_MULTIPLE, documents, one_document_a_row


def test_documents_begin_where_samples_and_padding_begin():
    spans = [(7, 0, 0, 30), (3, 0, 30, 95), (0, 1, 0, 100)]  # five positions of padding behind the first row
    made = documents(num_rows=2, row_length=100, spans=spans)
    assert made.cu_seq_q.dtype == torch.int32
    assert made.cu_seq_q[:5].tolist() == [0, 30, 95, 100, 200]
    # The rest are documents without positions, so that few shapes occur.
    assert made.cu_seq_q[5:].tolist() == [200] * (BOUNDARIES_MULTIPLE - 5)
    assert made.max_q == 128


def test_an_empty_row_is_one_document():
    made = documents(num_rows=1, row_length=64, spans=[])
    assert made.cu_seq_q.unique().tolist() == [0, 64] and made.max_q == 64


def test_a_row_of_two_documents_needs_their_boundaries():
    assert one_document_a_row([(4, 0, 0, 30), (2, 1, 0, 100)])
    assert not one_document_a_row([(4, 0, 0, 30), (2, 0, 30, 100)])


@pytest.mark.parametrize("kernel", ["varlen", "cudnn"])
def test_kernels_for_ragged_documents_are_refused_where_they_cannot_be(kernel):
    config = TrainerConfig(model=ModelConfig(), attention=kernel)
    with pytest.raises(ValueError, match=f"attention='{kernel}' with compute_dtype='float32'"):
        config.validate()
    config.compute_dtype = "bfloat16"
    config.validate()
    config.parallelism.context_parallel_degree = 2
    with pytest.raises(ValueError, match="context_parallel_degree=2 with attention="):
        config.validate()
