"""Attention of a decode step, over rows of their own lengths, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from ppo_fast import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# n, heads, key heads, columns, size, value size: groups of 1 to 7, sizes that no vector divides, one column, many.
SHAPES = [
    (5, 6, 2, 40, 64, 64),
    (3, 7, 1, 300, 80, 80),
    (2, 4, 4, 1, 8, 8),
    (4, 4, 2, 33, 7, 13),
    (1, 3, 3, 600, 1, 40),
]
PATHS = [name for name in ops.backends.available() if name != "triton"]


def _inputs(shape, dtype, seed=0):
    n, heads, key_heads, columns, size, value_size = shape
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(*s, generator=generator).to(dtype)
        for s in ((n, heads, 1, size), (n, key_heads, columns, size), (n, key_heads, columns, value_size))
    )
    lengths = torch.randint(1, columns + 1, (n,), generator=generator)
    lengths[0] = columns
    return query, key, value, lengths


def _expected(query, key, value, lengths, scale=None, window=None, softcap=None):
    """Row by row over the columns it has, float64 [n, heads, E]."""
    rows = []
    for i, length in enumerate(lengths.tolist()):
        first = 0 if window is None else max(0, length - window)
        group = query.shape[1] // key.shape[1]
        keys, values = (x[i, :, first:length].double().repeat_interleave(group, 0) for x in (key, value))
        scores = (query[i].double() @ keys.transpose(1, 2)) * (query.shape[3] ** -0.5 if scale is None else scale)
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        rows.append((scores.softmax(-1) @ values)[:, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("settings", [{}, {"scale": 0.7, "window": 9}, {"softcap": 2.0}, {"window": 1}])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_values(path, dtype, settings):
    """The inputs' own rounding aside: the result is rounded once."""
    eps = torch.finfo(dtype).eps
    for shape in SHAPES:
        inputs = _inputs(shape, dtype)
        with ops.backends.force(path):
            got = ops.decode_attention(*inputs, **settings)
        assert got.dtype == dtype
        expected = _expected(*inputs, **settings)
        bound = 4e-6 if dtype == torch.float32 else 1e-13 if dtype == torch.float64 else 0.6 * eps
        assert float((got.double() - expected).abs().max()) <= bound * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("path", PATHS)
def test_columns_past_a_rows_length_are_not_read(path):
    query, key, value, lengths = _inputs(SHAPES[0], torch.float32)
    with ops.backends.force(path):
        clean = ops.decode_attention(query, key, value, lengths)
        for row, length in enumerate(lengths.tolist()):
            key[row, :, length:] = torch.nan
            value[row, :, length:] = torch.inf
        assert torch.equal(ops.decode_attention(query, key, value, lengths), clean)


@pytest.mark.parametrize("path", PATHS)
def test_strides_and_large_scores(path):
    """A view of the first columns and rows of a larger cache, a transposed query, weights of all but one column 0."""
    query, key, value, lengths = _inputs(SHAPES[0], torch.float32)
    cache = torch.full((9, 2, 64, 64), torch.nan)
    cache[:5, :, :40] = key
    query = query.transpose(1, 2).contiguous().transpose(1, 2) * 1e4
    with ops.backends.force(path):
        got = ops.decode_attention(query, cache[:5, :, :40], value, lengths)
    torch.testing.assert_close(got.double(), _expected(query, key, value, lengths), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(PATHS == ["eager"], reason="needs the C++ extension")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_for_any_number_of_threads(dtype, threads):
    inputs = _inputs((16, 6, 2, 200, 64, 64), dtype)
    together = ops.decode_attention(*inputs)
    for row, length in enumerate(inputs[3].tolist()):
        query, key, value, lengths = (x[row : row + 1] for x in inputs)
        assert torch.equal(
            ops.decode_attention(query, key[:, :, :length], value[:, :, :length], lengths)[0], together[row]
        )
    for count in (1, 3):
        threads(count)
        assert torch.equal(ops.decode_attention(*inputs), together)


def test_nan_comes_through_in_its_row_alone():
    query, key, value, lengths = _inputs(SHAPES[0], torch.float32)
    clean = ops.decode_attention(query, key, value, lengths)
    key[1, 0, 0, 3] = torch.nan
    got = ops.decode_attention(query, key, value, lengths)
    assert got[1, :3].isnan().all()
    assert torch.equal(got[1, 3:], clean[1, 3:])
    assert torch.equal(got[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


def test_opcheck():
    query, key, value, lengths = _inputs(SHAPES[3], torch.float32)
    torch.library.opcheck(torch.ops.ppo_fast.decode_attention, (query, key, value, lengths, 0.3, 5, 0.0))


@pytest.mark.parametrize("path", PATHS)
def test_no_rows(path):
    query, key, value, lengths = _inputs(SHAPES[3], torch.float32)
    with ops.backends.force(path):
        assert ops.decode_attention(query[:0], key[:0], value[:0], lengths[:0]).shape == (0, 4, 13)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"query": [1.0]}, TypeError, "query must be a tensor, got list"),
        ({"key": torch.zeros(5, 2, 40, 64, dtype=torch.float64)}, TypeError, "key must have the dtype of query"),
        ({"value": torch.zeros(5, 2, 40)}, ValueError, "value must have four axes"),
        ({"query": torch.zeros(5, 6, 2, 64)}, ValueError, "query must have the shape of one query a head"),
        ({"key": torch.zeros(5, 4, 40, 64)}, ValueError, "a number of heads that divides query's 6, got 4"),
        ({"value": torch.zeros(5, 2, 39, 64)}, ValueError, "value must have the shape of key"),
        ({"lengths": torch.ones(5)}, TypeError, "lengths must be int64"),
        ({"lengths": torch.ones(4, dtype=torch.int64)}, ValueError, "lengths must have the shape of the rows of query"),
        ({"lengths": torch.tensor([40, 1, 1, 0, 1])}, ValueError, "lengths must be from 1 to the number of columns"),
        ({"lengths": torch.tensor([40, 1, 41, 2, 1])}, ValueError, "lengths must be from 1 to the number of columns"),
        ({"scale": math.nan}, ValueError, "scale must be above 0, got nan"),
        ({"window": 0}, ValueError, "window must be above 0, got 0"),
        ({"softcap": "no"}, TypeError, "softcap must be a number, got str"),
        ({"query": torch.zeros(5, 6, 1, 64, requires_grad=True)}, ValueError, "no derivative"),
    ],
)
def test_bad_input(changed, error, message):
    query, key, value, lengths = _inputs(SHAPES[0], torch.float32)
    arguments = {"query": query, "key": key, "value": value, "lengths": lengths} | changed
    with pytest.raises(error, match=message):
        ops.decode_attention(**arguments)
