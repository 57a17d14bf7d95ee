"""Any other decoder of transformers, through its attention interface.

The interface hands each layer's Q, K and V to a function; ours passes them to the step. The step travels as a keyword
of the model's forward. Whether a model really works this way is not read off its config: `probe.check` compares it
with transformers' own attention at load.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvikk.errors import ModelError
from kvikk.models.protocol import AttentionStep
from kvikk.models.spec import ModelSpec
from kvikk.models.weights import WAY_OUT

IMPLEMENTATION = "kvikk"
HARMLESS = frozenset({
    "cache", "dropout", "is_causal", "layer_idx", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_ids", "return_dict", "use_cache",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Passage:
    """What the attention function needs, carried through transformers' forward as its keyword `step`."""

    step: AttentionStep
    max_model_len: int


def register() -> None:
    """Make kvikk known to transformers' attention interface. Repeating it changes nothing.

    No mask function is registered: for a name without one transformers builds no masks.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend)


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, /,
    *, step: Passage, scaling: float | None = None, **effects: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of one layer as transformers calls it.

    Args:
        module: the attention layer; its `layer_idx` names the layer.
        query: `[1, q_heads, tokens, head_dim]`.
        key, value: `[1, kv_heads, tokens, head_dim]`.
        attention_mask: must be None: rows are told apart by the step.
        step: has no default, so that a forward that loses the keyword fails.
        scaling: factor on the scores; by default `head_dim**-0.5`.
        effects: anything else that the architecture wants of its attention.

    Returns:
        `[1, tokens, q_heads, head_dim]`, and no weights.

    Raises:
        ModelError: the architecture asks for an effect that kvikk does not compute.
    """
    _refuse_effects(module, attention_mask, step.max_model_len, effects)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return step.step.attend(module.layer_idx, q, k, v, scale=scale).unsqueeze(0), None


def _refuse_effects(module: Any, mask: Tensor | None, max_model_len: int, effects: dict[str, Any]) -> None:
    name = type(module).__name__
    if mask is not None:
        raise ModelError(f"{name} builds an attention mask of its own, which kvikk does not apply")
    if effects.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ModelError(f"{name} is not causal")
    if effects.get("dropout"):
        raise ModelError(f"{name} applies dropout {effects['dropout']} at inference")
    window = effects.get("sliding_window")
    if window is not None and window < max_model_len:
        raise ModelError(
            f"{name} slides over a window of {window} tokens and max_model_len is {max_model_len}: "
            f"pass --max-model-len {window}"
        )
    for effect, value in effects.items():
        if value is not None and effect != "sliding_window" and effect not in HARMLESS:
            raise ModelError(f"{name} asks its attention for {effect!r}, which kvikk does not compute")


class TransformersModel:
    """A `CausalLM` around a module of transformers.

    Args:
        module: loaded with the attention implementation `kvikk`.
        spec: the facts the engine reads.
        max_model_len: no window of the model is smaller.
    """

    def __init__(self, module: Any, spec: ModelSpec, max_model_len: int) -> None:
        self.spec = spec
        self.module = module
        self.longest = max_model_len
        self._backbone, self._head = split(module)

    @torch.no_grad()
    def forward(self, token_ids: Tensor, positions: Tensor, step: AttentionStep, outputs_at: Tensor) -> Tensor:
        """See `CausalLM.forward`."""
        outputs = self._backbone(
            input_ids=token_ids[None],
            position_ids=positions[None],
            attention_mask=None,
            use_cache=False,
            step=Passage(step, self.longest),
        )
        hidden: Tensor = outputs[0][0]
        return hidden.index_select(0, outputs_at)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.head`."""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


def split(module: Any) -> tuple[Any, Any]:
    """A causal model as its backbone and its head.

    The head is the module itself, sharing its weights, with a backbone that hands back the states it is given. So all
    that the architecture does after its backbone is done: scaling of logits, soft caps, norms. Whether the two
    together compute what the module does, `probe.check` finds out.

    Raises:
        ModelError: the module has no backbone of its own.
    """
    embeddings = module.get_input_embeddings()
    name = next(
        (name for name, child in module.named_children() if any(part is embeddings for part in child.modules())), None
    )
    if name is None or getattr(module, name) is embeddings:
        raise ModelError("its backbone cannot be told from its head")
    head = copy.copy(module)
    head._modules = {**module._modules, name: _Given(getattr(module, name))}
    return getattr(module, name), head


class _Given(torch.nn.Module):
    """Stands for a backbone in front of a head: its output is its input. In all else it is that backbone."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self._stands_for = (backbone,)  # in a tuple, so that it is no submodule

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _States:
        """The states, whatever else the head hands over."""
        return _States((inputs_embeds,))

    @property
    def decoder(self) -> _Given:
        """Some heads call their backbone's decoder."""
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_stands_for"][0], name)


class _States(tuple[Tensor]):
    """A backbone's output of which only the states are known; heads look at the rest only to pass it on."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Tensor:
        """`[1, outputs, hidden]`."""
        return self[0]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within, transformers draws no progress bars and warns of errors only; on leaving, both are as before."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def read_module(folder: Path, *, dtype: torch.dtype, device: torch.device, gguf: str | None = None) -> Any:
    """Let transformers read a checkpoint completely.

    Raises:
        ModelError: it cannot, or weights are missing or of another shape.
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "dtype": dtype}
    if gguf is not None:
        # Left packed, GGUF weights would reach us as bytes.
        options |= {"gguf_file": gguf, "quantization_config": GgufConfig(dequantize=True)}
    try:
        module, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    except Exception as error:  # transformers, torch and pickle each raise their own on a broken file
        raise ModelError(f"transformers cannot read the weights in {folder}: {error}. Way out: {WAY_OUT}") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            first = sorted(str(key) for key in report[kind])[0]
            raise ModelError(
                f"the checkpoint in {folder} has {kind.replace('_', ' ')}, {len(report[kind])} in all, "
                f"such as {first}: {WAY_OUT}"
            )
    return module.to(device).eval().requires_grad_(False)
