"""The same modules on a GPU: the same numbers, and fit for a graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_step import DenseKV
from test_llama_family import FAMILY
from test_transformers_models import SERVED
from tiny import module, random_rows, reference_logits, save

from kvikk.models import load_model, toy_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", [*FAMILY, *SERVED])
def test_fp32_logits_on_the_gpu_equal_those_of_transformers_on_the_cpu(name: str, tmp_path: Path) -> None:
    made = module((FAMILY | SERVED)[name]())
    device = torch.device("cuda")
    model = load_model(str(save(made, tmp_path)), device=device).model
    rows = random_rows(30, 11)
    tokens, positions = torch.cat(rows), torch.cat([torch.arange(len(row)) for row in rows])
    everything = torch.arange(len(tokens), device=device)
    step = DenseKV().step([len(row) for row in rows])
    logits = model.head(model.forward(tokens.to(device), positions.to(device), step, everything))

    torch.testing.assert_close(logits.cpu(), reference_logits(made, rows), atol=5e-5, rtol=1e-4)


def test_the_forward_can_be_captured_in_a_graph() -> None:
    class Echo:
        def attend(
            self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float
        ) -> torch.Tensor:
            return q

    model = toy_model(dtype=torch.bfloat16, device="cuda")
    tokens, positions = torch.arange(8, device="cuda"), torch.arange(8, device="cuda")
    wanted = model.head(model.forward(tokens, positions, Echo(), positions))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = model.head(model.forward(tokens, positions, Echo(), positions))
    graph.replay()
    assert torch.equal(got, wanted)
