"""The bench runner refuses wrong values, pairs ratios by round, judges bars; its JSON makes README's table and plot."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench_gae
import bench_linear_ppo_loss
import bench_linear_sample
import bench_linear_selected_logprobs
import bench_lora_linear
import bench_norms_and_gates
import bench_ppo_loss
import bench_rollout
import bench_selected_logprobs
import bench_small_linear
import head
import peers
import plots
import readme
import run as bench_run
from harness.bars import judge, paired_ratio
from harness.case import Bar, Case, Expected, Variant, Work
from harness.check import WrongValuesError, check_values, relative_error
from harness.floors import Floors
from harness.results import header
from harness.run import run_case, select
from harness.table import table
from harness.timing import MOST_ROUNDS, Rotation, copies_beyond_cache, time_rounds
from ppo_fast import ops

BENCH = Path(bench_run.__file__).parent
FP32, BF16 = torch.float32, torch.bfloat16
FLOORS = Floors(read=2e9, copy=1e9, gemm={"fp32": 1e9, "bf16": 4e9})


def case_of(*variants: Variant, **settings) -> Case:
    defaults = {
        "inputs": lambda seed: torch.full((4,), 1.0 + seed),
        "reference": lambda x: {"y": Expected(2 * x.double())},
    }
    return Case("twice", FP32, variants=variants, **(defaults | settings))


RIGHT = Variant("right", lambda x: {"y": x + x}, work=Work(bytes=32))


# --------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("run", "word"),
    [
        (lambda x: {"y": 2 * x + 0.001}, "off by"),
        (lambda x: {"y": torch.where(torch.arange(4) == 3, math.nan, 2 * x)}, "off by inf"),
        (lambda x: {"y": (2 * x)[:3]}, "off by inf"),
        (lambda x: {"z": 2 * x}, "returned"),
        (lambda x: {}, "returned"),
    ],
)
def test_a_wrong_variant_is_refused_and_not_timed(run, word):
    calls = []

    def counted(x):
        calls.append(1)
        return run(x)

    result = run_case(case_of(RIGHT, Variant("wrong", counted)), FLOORS, print, seconds=0.0, rounds=3)
    assert word in result["variants"]["wrong"]["refused"]
    assert len(calls) == 1
    assert len(result["variants"]["right"]["seconds_by_round"]) == 3
    row = judge(Bar("twice", "", "twice fp32", "wrong", 2.0, "right", ["right"]), {"twice fp32": result})
    assert row["met"] is None
    assert row["why"].startswith("wrong is refused: ")


def test_errors_are_relative_to_the_scale_and_only_the_picked_part_counts():
    expected = Expected(torch.tensor([10.0, -100.0], dtype=torch.float64), pick=torch.tensor([0, 2]))
    assert relative_error(torch.tensor([11.0, 5.0, -100.0]), expected) == pytest.approx(0.01)
    assert relative_error(torch.tensor(0.5), Expected(torch.tensor(0.4).double(), scale=10.0)) == pytest.approx(0.01)
    assert relative_error(torch.tensor([1.0]), Expected(torch.zeros(1).double())) == 1.0


def test_a_variant_may_promise_more_than_its_dtype():
    results, reference = {"y": torch.tensor([1.0001])}, {"y": Expected(torch.ones(1).double())}
    assert check_values(case_of(), Variant("any", dict), results, reference) < 2e-4
    with pytest.raises(WrongValuesError):
        check_values(case_of(), Variant("exact", dict, tolerance=1e-6), results, reference)


# --------------------------------------------------------------------------------------------------------------- timing


def test_inputs_go_round_further_than_the_cache_reaches():
    assert copies_beyond_cache(10, cache=100) == 22
    assert copies_beyond_cache(1000, cache=100) == 2
    rotation = Rotation(lambda seed: seed, 3)
    assert [rotation.next() for _ in range(7)] == [1, 2, 0, 1, 2, 0, 1]


def test_rounds_are_interleaved_and_their_order_moves_on():
    order = []
    variants = [Variant(name, lambda x, name=name: order.append((name, x)) or {}) for name in "abc"]
    times = time_rounds(case_of(), variants, Rotation(lambda seed: seed, 2), 0.0, 4)
    assert "".join(name for name, _ in order) == "abcbcacababc"
    assert all(order[i][1] != order[i + 1][1] for i in range(11))
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 4, "b": 4, "c": 4}
    assert len(time_rounds(case_of(), variants[:1], Rotation(lambda seed: seed, 1), 1e9, 1)["a"]) == MOST_ROUNDS


def test_preparation_is_not_timed_and_not_skipped():
    prepared = []
    variant = Variant("p", lambda x: {"y": 2 * x}, lambda x: prepared.append(x) or x)
    run_case(case_of(variant), FLOORS, print, seconds=0.0, rounds=3)
    assert len(prepared) == 4  # the checked call and three rounds


def test_a_missing_peer_is_reported():
    said = []
    missing = Variant("peer", lambda x: 1 / 0, missing="it is not installed")
    result = run_case(case_of(RIGHT, missing), FLOORS, said.append, seconds=0.0, rounds=2)
    assert result["variants"]["peer"] == {"missing": "it is not installed"}
    assert any("missing: it is not installed" in line for line in said)
    assert len(result["variants"]["right"]["seconds_by_round"]) == 2
    bar = Bar("twice", "", "twice fp32", "right", 2.0, "the peer", ["peer"], "at least")
    row = judge(bar, {"twice fp32": result})
    assert (row["met"], row["why"]) == (None, "peer is missing: it is not installed")
    assert "peer is missing: it is not installed" in table([row])


def test_floors_take_the_slower_of_arithmetic_and_memory():
    assert FLOORS.seconds(Work(flops=4e9, bytes=2e9), "fp32") == 4.0
    assert FLOORS.seconds(Work(flops=4e9, bytes=8e9), "bf16") == 4.0


def test_selection_by_word_and_length():
    cases = [case_of(), Case("gae", BF16, case_of().inputs, case_of().reference, (), long=True)]
    assert [case.key for case in select(cases, [], long=True)] == ["twice fp32", "gae bf16"]
    assert [case.key for case in select(cases, [], long=False)] == ["twice fp32"]
    assert [case.key for case in select(cases, ["bf16", "nothing"], long=True)] == ["gae bf16"]


# ----------------------------------------------------------------------------------------------------------------- bars


def test_a_ratio_pairs_what_was_measured_in_the_same_round():
    # The machine is ten times slower in the last round; a ratio of medians would say 1.5.
    assert paired_ratio([[2.0, 2.0, 20.0]], [[1.0, 1.0, 10.0]]) == 2.0
    assert paired_ratio([[3.0, 30.0]], [[1.0, 10.0], [2.0, 20.0]]) == 1.0


def results_of(**cases):
    return {
        key: {
            "variants": {
                name: {"seconds_by_round": [value, value], "peak_bytes": 1e6 * value}
                for name, value in variants.items()
            }
        }
        for key, variants in cases.items()
    }


@pytest.mark.parametrize(
    ("bar", "measured", "met", "margin"),
    [
        ({"limit": 0.8, "to": ["base"]}, 0.5, True, -0.375),
        ({"limit": 0.4, "to": ["base"]}, 0.5, False, 0.25),
        ({"limit": 0.5, "to": ["base"]}, 0.5, True, 0.0),
        ({"limit": 0.2, "to": ["base", "other"]}, 0.25, False, 0.25),
        ({"limit": 2.0, "to": ["base"], "sense": "at least"}, 2.0, True, 0.0),
        ({"limit": 4.0, "to": ["base"], "sense": "at least"}, 2.0, False, -0.5),
        ({"limit": 2.5, "kind": "memory"}, 2.0, True, -0.2),
        ({"limit": 0.03, "to": ["base"], "kind": "ratio growth", "since": "small"}, 0.1, False, 0.07),
        ({"limit": 0.5, "kind": "memory growth", "since": "small", "less": (0.9, 0.1)}, 0.2, True, -0.3),
    ],
)
def test_bars_are_judged_by_their_sense(bar, measured, met, margin):
    cases = results_of(large={"own": 2.0, "base": 4.0, "other": 4.0}, small={"own": 1.0, "base": 2.5})
    row = judge(Bar("op", "row", "large", "own", **bar), cases)
    assert (row["measured"], row["met"]) == (pytest.approx(measured), met)
    assert row["margin"] == pytest.approx(margin)
    assert ("**missed** by" in table([row])) is not met


def test_the_figure_of_the_out_form_stands_beside():
    cases = results_of(large={"own": 2.0, "base": 4.0, "out": 2.5})
    row = judge(Bar("op", "row", "large", "own", 0.6, "GEMM", ["base"], beside=["out"]), cases)
    assert (row["measured"], row["beside"]) == (0.5, 0.8)
    assert "at most 0.6x GEMM | 0.500x | 0.800x |  | met by 16.7%" in table([row])


def test_what_was_not_run_is_said():
    assert judge(Bar("op", "row", "nowhere", "own", 1.0), {})["why"] == "nowhere was not run"
    cases = {"a": {"variants": {"own": {"seconds_by_round": [1.0]}}}}
    assert judge(Bar("op", "row", "a", "own", 1.0, kind="memory"), cases)["why"] == "memory was not measured"


def test_every_bar_names_variants_that_exist():
    cases = {case.key: case for case in bench_run.CASES}
    assert len(cases) == len(bench_run.CASES)
    for bar in bench_run.BARS:
        names = {variant.name for variant in cases[bar.case].variants}
        assert {bar.of, *bar.to, *bar.beside} <= names, bar
        if bar.since:
            assert {bar.of, *bar.to, *bar.beside} <= {variant.name for variant in cases[bar.since].variants}, bar
        if "memory" in bar.kind:
            assert bar.of in cases[bar.case].memory, bar


# ----------------------------------------------------------------------------------------- the real cases, tiny


def tiny_cases(monkeypatch):
    monkeypatch.setattr(peers, "compiled", lambda function: function)  # inductor takes a compiler and half a minute
    small = lambda tokens, dtype, vocabulary=0, hidden_size=0: head.make_head(tokens, dtype, 3000, 32)  # noqa: E731
    for module in (bench_linear_selected_logprobs, bench_linear_ppo_loss):
        monkeypatch.setattr(module, "make_head", small)
    frozen = bench_linear_ppo_loss._frozen_or_trainable
    for dtype in (FP32, BF16):
        yield from bench_selected_logprobs.cases(dtype, rows=3, vocabulary=1000)
        scoring = [bench_linear_selected_logprobs.SCORE, bench_linear_selected_logprobs.GRADIENT]
        yield bench_linear_selected_logprobs.case(24, dtype, [*scoring, "kept sets, with gradient", "eager", "TRL"])
        yield frozen(24, dtype, False)
        yield frozen(24, dtype, True)
        yield bench_linear_ppo_loss._fewer_rows(24, dtype)
    yield bench_gae.case((6, 9))
    yield bench_ppo_loss.case((6, 9))
    yield bench_small_linear.case(40, 70, BF16)
    for dtype in (FP32, BF16):
        yield bench_lora_linear.case(24, 40, 70, dtype)
        for op in ("swiglu", "rms_norm"):
            yield bench_norms_and_gates.case(op, 24, 40, dtype)
    yield bench_linear_sample.case(FP32, 3, 3000, 32)


def test_the_cases_pass_their_own_check(monkeypatch):
    for case in tiny_cases(monkeypatch):
        result = run_case(replace(case, copies=2), FLOORS, lambda line: None, seconds=0.0, rounds=1)
        assert not [variant for variant in result["variants"].values() if "refused" in variant], case.key


def test_a_kernel_that_is_slightly_off_fails_its_case(monkeypatch):
    real = ops.linear_ppo_loss
    monkeypatch.setattr(ops, "linear_ppo_loss", lambda *rows, **settings: real(*rows, temperature=1.005, **settings))
    case = next(case for case in tiny_cases(monkeypatch) if case.key.startswith("linear_ppo_loss frozen"))
    result = run_case(case, FLOORS, lambda line: None, seconds=0.0, rounds=1)
    assert "d_hidden is off" in result["variants"]["frozen head"]["refused"]


def test_behaviour_log_probs_keep_ratios_away_from_the_clip():
    x = head.make_head(64, FP32, vocabulary=40_000, hidden_size=256)
    logprobs = torch.log_softmax(x.hidden @ x.weight.t(), -1).gather(-1, x.ids[:, None])[:, 0]
    assert (logprobs - x.old).abs().max() < 0.15
    clipped = logprobs - x.old_half_clipped
    assert (clipped[x.half].abs() > 0.35).all()
    assert (clipped[~x.half].abs() < 0.15).all()
    assert (clipped[x.half] * x.advantages[x.half] > 0).all()  # beyond the edge on the side where the clip bites
    assert all(
        len(set(row)) == head.KEPT and int(token) in row for row, token in zip(x.kept_ids.tolist(), x.ids, strict=True)
    )


# -------------------------------------------------------------------------------------------------------------- results


def test_the_record_names_no_host_and_no_path():
    record = header(BENCH, 2)
    text = json.dumps(record)
    assert set(record) == {"machine", "versions", "commit", "backends"}
    assert record["versions"]["torch"] == torch.__version__
    assert str(Path.home()) not in text
    assert str(BENCH.parent) not in text


def result_of_tiny_run():
    variants = {
        name: {"seconds": 1.0, "seconds_by_round": [1.0], "floor_seconds": 0.25, "peak_bytes": 2e6}
        for name in ("GEMM 1", "GEMM 2", "frozen head", "eager")
    }
    cases = {
        f"scaling N={n} V={v} fp32": {"variants": variants} for n, v in ((256, 151936), (64, 151936), (256, 32000))
    }
    bar = Bar(
        "linear_ppo_loss", "row", "scaling N=64 V=151936 fp32", "frozen head", 0.8, "2 GEMMs", ["GEMM 1", "GEMM 2"]
    )
    record = {
        **header(BENCH, 2),
        "name": "ops-here",
        "floors": FLOORS.as_json(),
        "cases": cases,
        "bars": [judge(bar, cases)],
    }
    return json.loads(json.dumps(record))


def test_readme_and_plot_are_made_of_the_json(tmp_path):
    result = result_of_tiny_run()
    text = readme.ops(result)
    assert "1 of 1 bars met" in text
    assert "| `linear_ppo_loss` | row | fp32 | at most 0.8x 2 GEMMs | 0.500x |  | 4.0 | met by 37.5% |" in text
    assert [point[0] for point in plots.series(result["cases"], "N")["2 GEMMs"]] == [64, 256]
    assert [point[0] for point in plots.series(result["cases"], "V")["eager"]] == [32000, 151936]
    plots.scaling(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


# -------------------------------------------------------------------------------------------------------------- rollout


def test_every_rollout_bar_has_its_case():
    cases = {case.key: {variant.name for variant in case.variants} for case in bench_rollout.CASES}
    assert {bar.case for bar in bench_rollout.BARS} == cases.keys()
    assert all({bar.of, *bar.to} <= cases[bar.case] for bar in bench_rollout.BARS)
    lengths = bench_rollout.drawn_lengths(2000)
    assert max(lengths) == 256
    assert 30 <= sorted(lengths)[1000] <= 34
