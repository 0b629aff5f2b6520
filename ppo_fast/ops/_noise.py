"""The noise of sampling: a pure function of (seed, position, token), so that a draw depends on nothing else.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") keyed by the seed; the counter is
(token // 4, half, position). One block serves four tokens; half 0 holds the upper 32 bits of their uniform numbers,
half 1 the lower ones. csrc/linear_sample.cpp says why there are 64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> list[Tensor]:
    """The four words of a block. All tensors int64 in [0, 2^32), of shapes that broadcast: 4 counters and 2 keys."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        x, y = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # modulo 2^64: the right bits, whatever the sign
        a, b, c, d = ((y >> 32) & _MASK) ^ b ^ k, y & _MASK, ((x >> 32) & _MASK) ^ d ^ m, x & _MASK
        k, m = (k + _WEYL[0]) & _MASK, (m + _WEYL[1]) & _MASK
    return [a, b, c, d]


def gumbel(
    keys: Tensor,  # [n, 2] int64: seed, position
    blocks: Tensor,  # [1 or n, m] int64: token // 4
    dtype: torch.dtype,
) -> Tensor:
    """Standard Gumbel noise [n, m, 4] of the four tokens of each block."""
    words = [(keys[:, i, None] >> shift) & _MASK for i in (0, 1) for shift in (0, 32)]
    key, position = (words[0], words[1]), (words[2], words[3])
    high, low = (
        torch.stack(torch.broadcast_tensors(*philox((blocks, torch.full_like(blocks, half), *position), key)), -1)
        for half in (0, 1)
    )
    u = high.to(dtype) * 2.0**-32 + (low.to(dtype) + 0.5) * 2.0**-64
    u = u.clamp(max=1 - torch.finfo(dtype).eps / 2)
    return -torch.log(-torch.log1p(-u))
