"""The counted-bytes model of bench/kernel_bytes.py against what the kernels load, store and multiply, interpreted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from launches import replace_kernels
from triton.runtime.interpreter import InterpreterBuilder

import kernel_bytes as model
from ppo_fast.kernels import (
    gae,
    head_scores,
    kept,
    linear_head,
    linear_sample,
    ppo_loss,
    selected_logprobs,
    value_loss,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

Found = dict[str, list[int]]  # kernel -> bytes read, bytes written, operations in products


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], Found]:
    """Counts the memory traffic and the products of every kernel that a call launches."""
    found: Found = defaultdict(lambda: [0, 0, 0])
    running = [""]
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    dot = InterpreterBuilder.create_dot

    def width(pointers: Any) -> int:
        return max(pointers.get_element_ty().primitive_bitwidth // 8, 1)

    def counting_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        found[running[0]][0] += int(mask.data.sum()) * width(pointers)
        return load(self, pointers, mask, *rest)

    def counting_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found[running[0]][1] += int(mask.data.sum()) * width(pointers)
        return store(self, pointers, value, mask, *rest)

    def counting_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        found[running[0]][2] += 2 * a.data.size * b.data.shape[-1]
        return dot(self, a, b, *rest)

    class Named:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: Any, **keywords: Any) -> None:
                running[0] = self.name
                self.kernel[grid](*arguments, **keywords)

            return launch

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counting_store)
    monkeypatch.setattr(InterpreterBuilder, "create_dot", counting_dot)
    replace_kernels(monkeypatch, Named)

    def count(call: Callable[[], object]) -> Found:
        found.clear()
        call()
        return dict(found)

    return count


def as_list(*counts: model.Count) -> list[int]:
    return [sum(x.reads for x in counts), sum(x.writes for x in counts), sum(x.flops for x in counts)]


def test_rows_of_logits(counted: Callable[..., Found]) -> None:
    n, V = 3, 301
    logits, ids = torch.randn(1, n, V).bfloat16(), torch.randint(V, (1, n))
    t, mask = torch.ones(1, n), torch.ones(1, n, dtype=torch.bool)
    results: list[Any] = []
    found = counted(lambda: results.extend(selected_logprobs.selected_logprobs(logits, ids, t, mask, True)))
    assert found["forward_kernel"] == as_list(model.selected_logprobs_forward(n, V, 2))
    rest = logits, ids, t, mask, *results[1:]
    found = counted(lambda: selected_logprobs.selected_logprobs_backward(t, t, *rest))
    assert found["backward_kernel"] == as_list(model.selected_logprobs_backward(n, V, 2))


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_layer_with_a_gradient(counted: Callable[..., Found], dtype: torch.dtype, shaped: bool) -> None:
    n, H, V = 3, 16, 301
    hidden, weight, ids = torch.randn(n, H).to(dtype), torch.randn(V, H).to(dtype), torch.randint(V, (n,))
    row, logits, bias = torch.ones(n), torch.empty(n, V), torch.randn(V) if shaped else None

    def call() -> None:
        rest = ids, row, None, 1.0, logits
        results = linear_head.head_forward(hidden, weight, bias, *rest, True)
        linear_head.head_backward(hidden, weight, *rest, *results, row, row, True, None, None)

    found = counted(call)
    assert found["statistics_kernel"] == as_list(model.head_statistics(n, V, shaped))
    assert found["gradient_kernel"] == as_list(model.head_gradient(n, V, dtype.itemsize))


@pytest.mark.parametrize("shape", [(5, 33, 301), (40, 64, 301)], ids=str)
def test_scoring(counted: Callable[..., Found], monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int]) -> None:
    monkeypatch.setenv("PPO_FAST_SCORING", "fused")
    n, H, V = shape
    hidden, weight, ids = torch.randn(n, H), torch.randn(V, H), torch.randint(V, (n,))
    tile = head_scores.tile_for(n, weight)
    found = counted(lambda: linear_head.head_forward(hidden, weight, None, ids, torch.ones(n), None, 1.0, None, True))
    assert found["score_kernel"] == as_list(model.head_score(n, H, V, 4, tile))
    assert found["combine_splits_kernel"] == as_list(model.head_combine(n, head_scores.splits(n, V, tile)[0]))


def test_drawing(counted: Callable[..., Found]) -> None:
    n, H, V = 20, 64, 301
    hidden, weight, keys = torch.randn(n, H), torch.randn(V, H), torch.arange(2 * n).reshape(n, 2)
    found = counted(lambda: linear_sample.draw(hidden, weight, None, torch.ones(n), keys, None, 1.0))
    tile = head_scores.fitted(linear_sample._TILES[4], H)
    assert found["race_kernel"] == as_list(model.sample_race(n, H, V, 4, tile))
    assert found["finish_kernel"] == as_list(model.sample_finish(n, head_scores.splits(n, V, tile)[0]))


@pytest.mark.parametrize(("H", "same"), [(33, False), (600, True)])
def test_kept_sets(counted: Callable[..., Found], H: int, same: bool) -> None:
    n, K, V = 3, 20, 100
    hidden, weight = torch.randn(n, H).bfloat16(), (torch.randn(V, H) / H).bfloat16()  # no probability underflows
    ids = torch.arange(K).expand(n, K) if same else torch.randperm(V)[: n * K].reshape(n, K)
    ids, row, d_weight = ids.contiguous(), torch.ones(n), torch.zeros(V, H)

    def call() -> None:
        middle = ids[:, 0].contiguous(), row, ids, None, 1.0
        logits, _, _ = kept.kept_forward(hidden, weight, None, *middle, True)
        kept.kept_backward(row, row, logits, hidden, weight, *middle, True, d_weight, None)

    found = counted(call)
    moved = [("forward_kernel", model.kept_forward(n, K, H, 2)), ("d_hidden_kernel", model.kept_d_hidden(n, K, H, 2))]
    moved += [("gradient_kernel", model.kept_gradient(n, K))]
    moved += [("d_weight_kernel", model.kept_d_weight(n, K, H, 2, K if same else n * K))]
    for name, count in moved:  # their products are no tl.dot
        assert found[name] == [*as_list(count)[:2], 0]


@pytest.mark.parametrize("T", [40, 1500])
def test_rows_of_tokens(counted: Callable[..., Found], T: int) -> None:
    B = 2
    x, mask, row = torch.randn(B, T), torch.ones(B, T, dtype=torch.bool), torch.ones(B)
    found = counted(lambda: gae.gae(x, x, mask, 0.99, 0.95, row))
    assert found["gae_kernel"] == as_list(model.gae_scan(B, T))
    assert found["merge_moments_kernel"] == as_list(model.gae_moments(B))
    found = counted(lambda: ppo_loss.ppo_loss(x, x, x, mask, row, x, x, 0.2, 0.2, None, 0, 0.0, 0.0, 3))
    assert found["ppo_loss_kernel"] == as_list(model.ppo_loss_tokens(B * T, B))
    assert found["combine_kernel"] == as_list(model.combined_sums(B * T, ppo_loss._N_SUMS))
    found = counted(lambda: value_loss.value_loss(x, x, x, mask, row, 0.2))
    assert found["value_loss_kernel"] == as_list(model.value_loss_tokens(B * T, B))
    assert found["combine_kernel"] == as_list(model.combined_sums(B * T, value_loss._N_SUMS))


def test_the_page_is_what_the_code_says() -> None:
    assert model.PAGE.read_text(encoding="utf-8") == model.page(), "run python bench/kernel_bytes.py --write"


def test_nothing_is_counted_below_the_least() -> None:
    for _, what, count in model.ROWS:
        assert count().reads + count().writes >= count().least, what
