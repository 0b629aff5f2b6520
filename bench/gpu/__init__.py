"""The ops on a GPU against what a user would have instead, and the choice dispatch should make. Run by bench/gpu.sh.

    GEMMs        the head's three products, 16-bit: what the linear ops are measured against
    scoring      log-prob and entropy without gradients
    actor loss   PPO loss with entropy bonus, forward and backward, head frozen and trainable
    sampling     a decode step's tokens from hidden states
    rows         ops on logits, advantages and log-probs that are there already
    choice       scoring by `head_scores` or through the vendor's GEMM, by number of tokens
    iteration    one PPO iteration of a 7B-shaped model with LoRA, random weights: its peak memory

A variant's values are compared with float64 before it is timed: ours must be at least as near as plain PyTorch.
Variants of a case are timed in turns, and the medians of their times are set against each other.
"""
