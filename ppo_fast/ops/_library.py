"""The one torch.library object of the namespace ``ppo_fast``, and what every registered op needs of it.

An op is defined by its schema and its plain PyTorch implementation (``_eager.py``), which becomes the default for
every device (key CompositeExplicitAutograd). C++ binds the CPU key, Triton the CUDA key; ``_backends.py`` says which
one runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

NAMESPACE = "ppo_fast"
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

# Every registered op by name, with its plain PyTorch implementation.
EAGER: dict[str, Callable[..., Any]] = {}


def stat_dtype(dtype: torch.dtype) -> torch.dtype:
    """Statistics (log-probs, losses, advantages) are float32 whatever the input, float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_dtype(device: torch.device) -> torch.dtype:
    """Sums over many tokens are float64, except on MPS, which has no such type."""
    return torch.float32 if device.type == "mps" else torch.float64


def define(schema: str, eager: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define ``ppo_fast::<schema>`` with its default implementation and its shape rule for tracing."""
    name = LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,)).split("::")[-1]
    LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    EAGER[name] = eager


def differentiable(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """Give the op ``name`` its derivative."""
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def no_double_backward(name: str, public_name: str) -> None:
    """Make differentiating through the op ``name``, itself a derivative, a clear error instead of a silent zero."""

    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError(f"double backward through {NAMESPACE}::{public_name} is not supported")

    differentiable(name, backward, lambda ctx, inputs, output: None)


def transformed() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp) traces this call.

    An autograd Function with a context is refused there, and one with ``setup_context`` costs a look at its signature
    in every call. Ops called hundreds of times in a pass have the former, and are their formula under a transform.
    """
    return torch._C._are_functorch_transforms_active()


def may_give_away(grad_loss: Tensor) -> bool:
    """Whether a gradient made in the forward pass is the result itself, so that its buffer may be handed out.

    The factor must be exactly 1, which is what a loss that is the root gets, and the graph freed afterwards: whoever
    receives the buffer may add to it. Reading the factor costs a synchronisation on GPUs, and is left out under
    torch.compile.
    """
    # Grad mode is on for create_graph=True.
    if torch.is_grad_enabled() or type(grad_loss) is not Tensor:
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph() and grad_loss.item() == 1.0


def define_loss_backward(public_name: str) -> None:
    """Define ``<public_name>_backward(grad_loss 0-d, gradient, source)``: the saved gradient times the incoming scalar.

    Out of place, since a second backward needs the saved gradient unchanged. ``source`` is the differentiated input:
    its values are not read, but the result hangs on it, so that double backward meets the error.
    """

    def eager(grad_loss: Tensor, gradient: Tensor, source: Tensor) -> Tensor:
        return grad_loss * gradient

    name = f"{public_name}_backward"
    define(
        f"{name}(Tensor grad_loss, Tensor gradient, Tensor source) -> Tensor",
        eager,
        lambda g, d, _: d.new_empty(d.shape),
    )
    no_double_backward(name, public_name)


def mutates(name: str, argument: int) -> None:
    """Make the in-place op ``name`` bump the version of its positional ``argument``, as PyTorch's own in-place ops do.

    Autograd compares versions when it unpacks a saved tensor: without the bump a later backward would read the
    overwritten values and give wrong numbers in silence.
    """
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def bump_then_run(keyset: Any, *args: Any) -> Any:
        torch.autograd.graph.increment_version(args[argument])
        return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    LIBRARY.impl(name, bump_then_run, "ADInplaceOrView", with_keyset=True)


@contextlib.contextmanager
def autograd_inside_op() -> Iterator[None]:
    """Let ``torch.autograd.grad`` work inside an op's implementation, where the dispatcher has switched autograd off.

    Tensors made here are normal ones even under ``torch.inference_mode``; make inputs leaves with `detached`.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch.inference_mode(False), torch.enable_grad(), torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


def detached(x: Tensor) -> Tensor:
    """``x`` as a constant that autograd may save: an inference tensor has to be copied for that."""
    return x.clone() if x.is_inference() else x.detach()
