"""How time and memory grow with the tokens and with the vocabulary: the PPO loss, frozen head, float32."""

from __future__ import annotations

import torch

from bench_linear_ppo_loss import ENTROPY_COEF, FROZEN, OWN, peer_variants, ppo_fast_loss, ready, token_loss
from harness.case import Case, Variant
from head import VOCABULARY, Head, answers, gemm_answers, gemm_work, gemms, make_head

TOKENS = (64, 256, 1024, 8192)
VOCABULARIES = (32_000, 64_000, 262_144)
AT_TOKENS = 256
MOST_TOKENS_OF_PEERS = 1024
"""Beyond, full logits and their gradients take more than 10 GB."""


def case(tokens: int, vocabulary: int) -> Case:
    """GEMMs 1 and 2 and the loss; the peers where full logits fit."""
    work = gemm_work(2, tokens, vocabulary)
    with_peers = tokens <= MOST_TOKENS_OF_PEERS
    large = tokens > MOST_TOKENS_OF_PEERS
    return Case(
        f"scaling N={tokens} V={vocabulary}",
        torch.float32,
        inputs=lambda seed: make_head(tokens, torch.float32, vocabulary),
        reference=lambda x: {**gemm_answers(x), **answers(x, token_loss(x, x.old, ENTROPY_COEF, tokens))},
        variants=[
            *gemms(tokens, 2, vocabulary=vocabulary, out=False),
            Variant(
                FROZEN,
                lambda x: ppo_fast_loss(x, entropy_coef=ENTROPY_COEF),
                ready,
                work,
                tolerance=OWN[torch.float32],
            ),
            *(peer_variants(work) if with_peers else []),
        ],
        first_rows=Head.first,
        memory=(FROZEN, "eager", "TRL") if with_peers else (FROZEN,),
        seconds=4.0,
        rounds=1 if large else 2,
        long=True,
    )


CASES = [
    *(case(tokens, VOCABULARY) for tokens in TOKENS),
    *(case(AT_TOKENS, vocabulary) for vocabulary in VOCABULARIES),
]
