"""Every kernel, as dispatch would launch it, compiled for the GPUs we name: it compiles, fits, and spills nothing.

The launches are recorded, not retyped: the entry points run on CPU tensors with each kernel replaced by a recorder, and
what they pass (dtypes, missing arguments, alignment, block sizes, warps) is compiled for every target. No GPU is
touched, so this says nothing about speed or about what the compiled code computes; tests/kernels/interpret does the
latter on the same source.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import triton
from launches import replace_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction, mangle_type

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

if triton.knobs.runtime.interpret:
    pytest.skip("needs a process without TRITON_INTERPRET, run by make test", allow_module_level=True)

# Shared memory that one program may use, KiB.
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163),
    "sm_89": (GPUTarget("cuda", 89, 32), 99),
    "sm_90": (GPUTarget("cuda", 90, 32), 227),
    "sm_100": (GPUTarget("cuda", 100, 32), 227),
    "sm_120": (GPUTarget("cuda", 120, 32), 99),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64),
}


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # by parameter name
    options: dict[str, Any]  # of the compiler


def record(call: Callable[[], object]) -> list[Launch]:
    """The kernel launches that ``call`` makes, none of them carried out."""
    launches: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **keywords: Any) -> None:
                names = [p.name for p in self.kernel.params]
                arguments = dict(zip(names, args, strict=False))
                arguments |= {k: v for k, v in keywords.items() if k in names}
                assert list(arguments) == names
                options = {k: v for k, v in keywords.items() if k not in names}
                launches.append(Launch(self.kernel, grid, arguments, options))

            return launch

    with pytest.MonkeyPatch.context() as patch:
        replace_kernels(patch, lambda name, kernel: Recorder(kernel))
        call()
    return launches


def source(launch: Launch) -> ASTSource:
    """What the launcher would compile: types, constants, and which pointers and integers divide by 16."""
    signature, constants, attributes = {}, {}, {}
    for p in launch.kernel.params:
        value = launch.arguments[p.name]
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if p.is_constexpr or value is None or (is_int and value == 1 and not p.do_not_specialize):
            signature[p.name], constants[p.num,] = "constexpr", value
            continue
        signature[p.name] = p.annotation_type or mangle_type(value)
        number = value.data_ptr() if isinstance(value, Tensor) else value
        if not p.do_not_specialize and not isinstance(number, float) and number % 16 == 0:
            attributes[p.num,] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def describe(launch: Launch) -> str:
    """Equal for two launches that share their compiled code."""
    compiled = source(launch)
    return f"{launch.kernel.__name__} {compiled.signature} {compiled.constants} {compiled.attrs} {launch.options}"


def logits_launches(
    dtype: torch.dtype, V: int, *, optional: bool, backward: bool, apart: int | None = None
) -> list[Launch]:
    """``apart``: elements from the first [3, V] rows of logits to the second."""
    stat = torch.float64 if dtype == torch.float64 else torch.float32
    logits = torch.empty_strided((2, 3, V), (3 * V if apart is None else apart, V, 1), dtype=dtype)
    ids = torch.empty(2, 3, dtype=torch.int64)
    row, mask = torch.empty(2, 3, dtype=stat), torch.empty(2, 3, dtype=torch.bool)
    maybe_mask = mask if optional else None
    if not backward:
        return record(lambda: selected_logprobs.selected_logprobs(logits, ids, row, maybe_mask, optional))
    e = row if optional else None
    return record(lambda: selected_logprobs.selected_logprobs_backward(row, e, logits, ids, row, maybe_mask, row, row))


def gae_launches(stat: torch.dtype, T: int, *, optional: bool) -> list[Launch]:
    x, mask, bootstrap = torch.empty(4, T, dtype=stat), torch.empty(4, T, dtype=torch.bool), torch.empty(4, dtype=stat)
    return record(lambda: gae.gae(x, x, mask, 0.99, 0.95, bootstrap if optional else None))


def loss_launches(stat: torch.dtype, objective: int, estimator: int, *, optional: bool) -> list[Launch]:
    x, mask, weights = (
        torch.empty(4, 512, dtype=stat),
        torch.empty(4, 512, dtype=torch.bool),
        torch.empty(4, dtype=stat),
    )
    extra = (x, x) if optional else (None, None)
    dual = 3.0 if optional else None
    return record(
        lambda: ppo_loss.ppo_loss(x, x, x, mask, weights, *extra, 0.2, 0.2, dual, objective, 0.0, 0.0, estimator)
    )


def value_launches(stat: torch.dtype, *, optional: bool) -> list[Launch]:
    x, mask, weights = (
        torch.empty(4, 512, dtype=stat),
        torch.empty(4, 512, dtype=torch.bool),
        torch.empty(4, dtype=stat),
    )
    return record(lambda: value_loss.value_loss(x, x, x, mask, weights, 0.2 if optional else None))


def head_launches(
    n: int,
    dtype: torch.dtype,
    *,
    optional: bool,
    H: int = 64,
    V: int = 5008,
    transposed: bool = False,
    gradient: bool = False,
) -> list[Launch]:
    """Of scoring n tokens by `head_scores`, or of both row kernels around the vendor's products."""
    stat = torch.float64 if dtype == torch.float64 else torch.float32
    hidden = torch.empty(n, H, dtype=dtype)
    weight = torch.empty(H, V, dtype=dtype).T if transposed else torch.empty(V, H, dtype=dtype)
    ids, row = torch.empty(n, dtype=torch.int64), torch.zeros(n, dtype=stat)
    bias, temperature = (torch.empty(V, dtype=stat), row) if optional else (None, None)
    softcap, scale = (30.0, 0.5) if optional else (None, 1.0)
    logits = torch.empty(n, V, dtype=stat) if gradient else None

    def call() -> None:
        results = linear_head.head_forward(hidden, weight, bias, ids, temperature, softcap, scale, logits, optional)
        if logits is not None:
            e = row if optional else None
            d_weight = torch.zeros(V, H, dtype=stat)
            linear_head.head_backward(
                hidden, weight, ids, temperature, softcap, scale, logits, *results, row, e, True, d_weight, None
            )

    return record(call)


def kept_launches(dtype: torch.dtype, *, optional: bool) -> list[Launch]:
    n, K, H, V, stat = 4, 64, 896, 5008, torch.float64 if dtype == torch.float64 else torch.float32
    hidden, weight = torch.empty(n, H, dtype=dtype), torch.empty(V, H, dtype=dtype)
    ids, kept_ids, row = (
        torch.empty(n, dtype=torch.int64),
        torch.zeros(n, K, dtype=torch.int64),
        torch.empty(n, dtype=stat),
    )
    bias, extra, softcap = (torch.empty(V, dtype=stat), row, 30.0) if optional else (None, None, None)
    d_weight = torch.empty(V, H, dtype=stat)

    def call() -> None:
        middle = ids, extra, kept_ids, softcap, 1.0
        logits, _, _ = kept.kept_forward(hidden, weight, bias, *middle, optional)
        kept.kept_backward(row, extra, logits, hidden, weight, *middle, True, d_weight, bias)

    return record(call)


def draw_launches(n: int, dtype: torch.dtype, *, optional: bool, H: int = 64) -> list[Launch]:
    hidden, weight = torch.empty(n, H, dtype=dtype), torch.empty(5008, H, dtype=dtype)
    bias, temperature, softcap = (torch.empty(5008), torch.empty(n), 30.0) if optional else (None, torch.empty(n), None)
    keys = torch.empty(n, 2, dtype=torch.int64)
    return record(lambda: linear_sample.draw(hidden, weight, bias, temperature, keys, softcap, 1.0))


class Variant(NamedTuple):
    launch: Launch
    everywhere: bool


def variants() -> dict[str, Variant]:
    """What dispatch can choose on the chip at hand, by name, each compiled code once.

    All targets get each kernel in each dtype with every optional argument; sm_90 gets float32 and bfloat16 in the other
    shapes as well: without optional arguments, other objectives and estimators, small blocks, unaligned rows. The
    other targets get those in `make test-long`.
    """
    table: dict[str, Variant] = {}
    known: set[str] = set()

    def add(name: str, launches: list[Launch], *, everywhere: bool = False) -> None:
        for launch in launches:
            if describe(launch) not in known:
                known.add(describe(launch))
                table[f"{launch.kernel.__name__.strip('_')}-{name}"] = Variant(launch, everywhere)

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        for backward in (False, True):
            add(name, logits_launches(dtype, 151_936, optional=True, backward=backward), everywhere=True)
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for backward in (False, True):
            add(f"{name}-plain", logits_launches(dtype, 151_936, optional=False, backward=backward))
            add(f"{name}-odd", logits_launches(dtype, 5001, optional=True, backward=backward))
            add(f"{name}-small", logits_launches(dtype, 100, optional=True, backward=backward))
            far = logits_launches(dtype, 151_936, optional=True, backward=backward, apart=2**31)
            add(f"{name}-far", far)
    for stat in (torch.float32, torch.float64):
        name = str(stat).removeprefix("torch.")
        add(name, gae_launches(stat, 4000, optional=True), everywhere=True)
        add(name, loss_launches(stat, 0, 3, optional=True), everywhere=True)
        add(f"{name}-value", value_launches(stat, optional=True), everywhere=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        add(name, head_launches(200, dtype, optional=True), everywhere=dtype != torch.float16)
        add(f"{name}-few", head_launches(16, dtype, optional=True), everywhere=dtype == torch.bfloat16)
        if dtype == torch.float16:  # else the code of bfloat16, but for the type of the operands
            continue
        add(f"{name}-plain", head_launches(200, dtype, optional=False))
        add(f"{name}-odd", head_launches(200, dtype, optional=True, H=65))
        add(f"{name}-transposed", head_launches(200, dtype, optional=True, transposed=True))
        add(f"{name}-head-plain", head_launches(16, dtype, optional=False, gradient=True))
        add(f"{name}-head-odd", head_launches(16, dtype, optional=True, V=5001, gradient=True))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = f"{str(dtype).removeprefix('torch.')}-head"
        add(name, head_launches(16, dtype, optional=True, gradient=True), everywhere=dtype != torch.float16)
    add("float64-head", head_launches(16, torch.float64, optional=True, gradient=True))
    add("float16-draw", draw_launches(64, torch.float16, optional=True))
    for dtype in (torch.float32, torch.bfloat16):
        name = f"{str(dtype).removeprefix('torch.')}-draw"
        add(name, draw_launches(64, dtype, optional=True), everywhere=dtype == torch.bfloat16)
        add(f"{name}-few", draw_launches(16, dtype, optional=True), everywhere=dtype == torch.bfloat16)
        add(f"{name}-plain", draw_launches(64, dtype, optional=False))
        add(f"{name}-odd", draw_launches(64, dtype, optional=True, H=65))
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        name = f"{str(dtype).removeprefix('torch.')}-kept"
        add(name, kept_launches(dtype, optional=True), everywhere=dtype in (torch.float32, torch.bfloat16))
    add("bfloat16-kept-plain", kept_launches(torch.bfloat16, optional=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        add("tf32", head_launches(200, torch.float32, optional=True))
    if head_scores.chip(torch.device("cuda")) in ("sm_90", "sm_100"):
        for tile in head_scores._LARGE_TILES[2]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(head_scores, "tile_for", lambda n, weight, tile=tile: tile)
                add("bfloat16-autotuned-plain", head_launches(200, torch.bfloat16, optional=False))
                add("bfloat16-autotuned", head_launches(200, torch.bfloat16, optional=True))
    stat = torch.float32
    add("plain", gae_launches(stat, 48, optional=False))
    add("plain", loss_launches(stat, 0, 3, optional=False))
    for objective, estimator in itertools.product((0, 1), (1, 2, 3)):
        add(f"{('ppo', 'cispo')[objective]}-k{estimator}", loss_launches(stat, objective, estimator, optional=True))
    add("value-plain", value_launches(stat, optional=False))
    return table


def variants_on(target: str) -> dict[tuple[str, str], Variant]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_scores, "chip", lambda device: target)
        return {(name, target): variant for name, variant in variants().items()}


VARIANTS = {case: variant for target in TARGETS for case, variant in variants_on(target).items()}
LAUNCHES = {case: variant.launch for case, variant in VARIANTS.items()}
CASES = [
    pytest.param(
        case, id="-".join(reversed(case)), marks=[] if x.everywhere or case[1] == "sm_90" else pytest.mark.long
    )
    for case, x in VARIANTS.items()
]


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Future[CompiledKernel]]]:
    """The selected cases, compiling in the background into a cache of their own, one thread a core."""
    chosen = {
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    parse, one_at_a_time = JITFunction.parse, threading.Lock()

    def locked_parse(kernel: Any) -> Any:
        with one_at_a_time:  # before Python 3.13 ast.parse fails now and then with threads (gh-106905)
            return parse(kernel)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(os.cpu_count()) as pool:
        patch.setattr(JITFunction, "parse", locked_parse)
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield {
            case: pool.submit(triton.compile, source(launch), TARGETS[case[1]][0], launch.options)
            for case, launch in LAUNCHES.items()
            if case in chosen
        }


class Resources(NamedTuple):
    registers: int
    stack: int  # bytes; what spills go to
    local: int


def resources(kernel: CompiledKernel, folder: Path) -> Resources:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    assert found is not None, text
    return Resources(*map(int, found.groups()))


@pytest.mark.parametrize("case", CASES)
def test_compiles_without_spills_and_fits(
    compiled: dict[tuple[str, str], Future[CompiledKernel]],
    case: tuple[str, str],
    tmp_path: Path,
    resource_table: list[tuple[str, str, int, int, int]],
) -> None:
    kernel = compiled[case].result()
    shared = kernel.metadata.shared
    assert shared <= TARGETS[case[1]][1] * 1024
    if case[1] == "gfx942":
        counted = re.search(r"\.vgpr_count:\s*(\d+)", kernel.asm["amdgcn"])
        assert counted is not None
        # Scalar registers may overflow into lanes of vector ones, which is cheap; nothing may go to memory.
        spilled = re.findall(r"\.(?:vgpr_spill_count|private_segment_fixed_size):\s*(\d+)", kernel.asm["amdgcn"])
        resource_table.append((*case, int(counted.group(1)), shared, max(map(int, spilled))))
        assert spilled == ["0", "0"]
    else:
        used = resources(kernel, tmp_path)
        resource_table.append((*case, used.registers, shared, used.stack))
        if case[1] == "sm_90" or VARIANTS[case].everywhere:  # a few of the others spill a few bytes
            assert used.stack == 0
            assert used.local == 0


WIDE = [
    (f"{kernel}_kernel-{dtype}", "sm_90") for kernel in ("forward", "backward") for dtype in ("float32", "bfloat16")
]


@pytest.mark.parametrize("case", WIDE, ids=[name for name, _ in WIDE])
def test_rows_of_logits_are_read_as_the_launch_configuration_assumes(
    compiled: dict[tuple[str, str], Future[CompiledKernel]], case: tuple[str, str], tmp_path: Path
) -> None:
    """16 columns a lane in loads of 16 bytes, and registers for three resident programs of 8 warps."""
    launch = LAUNCHES[case]
    lanes = 32 * launch.options["num_warps"]
    columns = launch.arguments["BLOCK_V"] // lanes
    assert (lanes, columns) == (256, 16)
    kernel = compiled[case].result()
    width = launch.arguments["logits_ptr"].element_size()
    loops = 1 if case[0].startswith("forward") else 2  # backward may read a row twice
    assert len(re.findall(r"ld\.global\.v4\.b32", kernel.asm["ptx"])) == loops * columns * width // 16
    assert resources(kernel, tmp_path).registers <= 65536 // (3 * lanes)


def test_blocks_have_no_fewer_elements_than_lanes() -> None:
    """Else two lanes would hold the same column, and in place one would read what the other has written."""
    for V in (1, 2, 255, 256, 257, 1000, 4096, 4097, 151_936):
        for launch in logits_launches(torch.float32, V, optional=True, backward=True):
            assert launch.arguments["BLOCK_V"] >= 64 * launch.options["num_warps"]
    for T in (1, 63, 64, 65, 1000, 1024, 1025, 100_000):
        scan, _ = gae_launches(torch.float32, T, optional=True)
        assert scan.arguments["BLOCK_T"] >= 64 * scan.options["num_warps"]


def test_lengths_and_batch_sizes_do_not_recompile() -> None:
    """A trainer's batches differ in size: one kernel serves them all. (A row's length picks a block of 64 to 1024.)"""

    by_length = [gae_launches(torch.float32, T, optional=True)[0] for T in (1024, 1025, 1040, 4000)]
    assert len({describe(launch) for launch in by_length}) == 1
    mask, weights = torch.empty(7, 64, dtype=torch.bool), torch.empty(7)
    by_batch = []
    for B, T in ((1, 1), (1, 64), (7, 1), (5, 48), (7, 64)):
        x = torch.empty(B, T)
        by_batch += record(lambda x=x: value_loss.value_loss(x, x, x, mask, weights, 0.2))
    assert len({describe(launch) for launch in by_batch}) == 2  # the loss and the adding up
    heads = [head_launches(n, torch.bfloat16, optional=True) for n in (17, 32, 129, 256)]
    assert len({describe(launch) for launches in heads for launch in launches}) == 2  # products, and the adding up
