"""The oracle: small random checkpoints written by transformers itself, and transformers' answers for them.

    folder = build(CASES["qwen3-dense-first"], scratch)      # config.json, safetensors, tokenizer.json, chat template
    oracle = Oracle(folder)                                  # transformers, float32, eager attention and eager experts
    oracle.prefill_logits(ids), oracle.greedy(ids, 64), oracle.margins(ids, 64)

A case is decisive when the best token leads the second by far more than float32 rounding at every step: then "the same 64
tokens" is a statement about rules and not about luck. transformers' own initialisation would hide rules (norms of one,
biases of zero, nearly uniform gates), so `_randomise` fills every parameter.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SPECIALS = ("<|bos|>", "<|eos|>", "<|start|>", "<|end|>")
BOS, EOS = 0, 1
TOKENIZER_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TEXT = (
    "The router keeps the attention, the workers keep the experts, and the wire between them carries rows.\n"
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n"
    "Ein Bär, zwei Bären; ça va très bien; 漢字と仮名; emoji 🙂🚀; numbers 0123456789 and signs {}[]()<>=+-*/.\n"
)


@dataclass(frozen=True)
class Case:
    """One checkpoint. `config` holds the arguments of transformers' config class over `_COMMON`."""

    name: str
    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    shard_bytes: int = 0
    seed: int = 0
    embed_std: float = 0.375

    @property
    def prompt(self) -> list[int]:
        """A fixed prompt of 23 ids, none of them special."""
        draw = torch.Generator().manual_seed(1000 + self.seed)
        return torch.randint(len(SPECIALS), TOKENIZER_SIZE, (23,), generator=draw).tolist()


_CLASSES = {
    "qwen3_moe": "Qwen3Moe",
    "qwen2_moe": "Qwen2Moe",
    "mixtral": "Mixtral",
    "olmoe": "Olmoe",
    "granitemoe": "GraniteMoe",
}
_COMMON: dict[str, Any] = {
    "vocab_size": TOKENIZER_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 40},
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "granitemoe": {"num_local_experts": 8},
}


def _gqa(ratio: int, kv_heads: int = 1) -> dict[str, int]:
    return {"num_attention_heads": ratio * kv_heads, "num_key_value_heads": kv_heads}


def _rope(kind: str, theta: float = 10_000.0, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **values}}


_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0)
_LLAMA3 = _rope("llama3", 500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
_LINEAR = _rope("linear", factor=4.0)
_GRANITE = {"embedding_multiplier": 6.0, "attention_multiplier": 0.11, "residual_multiplier": 0.35, "logits_scaling": 0.06}

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("qwen3", "qwen3_moe", {**_gqa(4, 2), "head_dim": 16, "norm_topk_prob": True}),
        Case(
            "qwen3-dense-first",
            "qwen3_moe",
            {
                **_gqa(1, 4),
                **_YARN,
                "num_hidden_layers": 5,
                "mlp_only_layers": [0],
                "decoder_sparse_step": 2,
                "norm_topk_prob": False,
                "num_experts_per_tok": 1,
                "attention_bias": True,
                "tie_word_embeddings": True,
                "head_dim": 24,
            },
            torch.bfloat16,
            seed=6,
        ),
        Case(
            "qwen3-all-experts",
            "qwen3_moe",
            {**_gqa(7), **_LINEAR, "head_dim": 10, "norm_topk_prob": False, "num_experts_per_tok": 8, "mlp_only_layers": [0]},
            shard_bytes=40_000,
            seed=1,
        ),
        Case("qwen2-shared", "qwen2_moe", {**_gqa(4, 2), **_LLAMA3, "norm_topk_prob": False, "vocab_size": 333}, seed=5),
        Case(
            "qwen2-normed",
            "qwen2_moe",
            {
                **_gqa(7, 2),
                "hidden_size": 112,
                "num_hidden_layers": 4,
                "decoder_sparse_step": 2,
                "norm_topk_prob": True,
                "num_experts_per_tok": 3,
                "qkv_bias": False,
                "tie_word_embeddings": True,
            },
            torch.bfloat16,
            shard_bytes=60_000,
            seed=4,
        ),
        Case("mixtral", "mixtral", {**_gqa(4, 2), **_LLAMA3, "head_dim": 20}, shard_bytes=50_000, seed=7),
        Case(
            "mixtral-one-expert",
            "mixtral",
            {
                **_gqa(7),
                **_rope("default", 1_000_000.0),
                "hidden_size": 70,
                "num_experts_per_tok": 1,
                "tie_word_embeddings": True,
            },
            torch.bfloat16,
            seed=4,
        ),
        Case("olmoe-clip", "olmoe", {**_gqa(1, 4), "clip_qkv": 0.75, "norm_topk_prob": False}, seed=2),
        Case(
            "olmoe-normed",
            "olmoe",
            {**_gqa(4), **_YARN, "attention_bias": True, "norm_topk_prob": True, "num_experts_per_tok": 8},
            torch.bfloat16,
            seed=3,
        ),
        Case(
            "granite",
            "granitemoe",
            {**_gqa(4, 2), **_GRANITE, "attention_bias": True, "tie_word_embeddings": True},
            embed_std=0.04,
            seed=13,
        ),
        Case(
            "granite-plain",
            "granitemoe",
            {**_gqa(7), **_LINEAR, "hidden_size": 56, "num_experts_per_tok": 1},
            shard_bytes=30_000,
            seed=1,
        ),
    )
}


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without warnings, log lines and progress bars: a test's output is about our code."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build(case: Case, folder: Path) -> Path:
    """Writes the case's checkpoint to folder/<name>, unless it is there, and returns that path."""
    path = folder / case.name
    if (path / "complete").exists():
        return path
    with quiet():
        import transformers

        kind = _CLASSES[case.family]
        config = getattr(transformers, kind + "Config")(**{**_COMMON, **_EXPERTS[case.family], **case.config})
        model = getattr(transformers, kind + "ForCausalLM")(config)
        _randomise(model, case)
        extra = {"max_shard_size": case.shard_bytes} if case.shard_bytes else {}
        model.to(case.dtype).save_pretrained(path, **extra)
    write_tokenizer(path)
    (path / "complete").touch()
    return path


@torch.no_grad()
def _randomise(model: torch.nn.Module, case: Case) -> None:
    """Scales that keep activations near one, gates spread over experts, and logits far apart."""
    draw = torch.Generator().manual_seed(case.seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            centre = 0.0 if name.endswith("bias") else 1.0
            parameter.uniform_(centre - 0.4, centre + 0.4, generator=draw)
            continue
        gain = 4.0 if "lm_head" in name else 2.0 if "gate.weight" in name or "router" in name else 1.5
        std = case.embed_std if "embed" in name else gain / parameter.shape[-1] ** 0.5
        parameter.normal_(0.0, std, generator=draw)


def write_tokenizer(path: Path) -> None:
    """A byte-level BPE over `TEXT` with four special tokens and a chat template, as a checkpoint carries them."""
    (path / "tokenizer.json").write_text(_tokenizer_json())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "pad_token": SPECIALS[EOS],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


@functools.cache
def _tokenizer_json() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True) * 4, trainer)
    return str(tokenizer.to_str(pretty=True))


class Oracle:
    """transformers on one checkpoint: float32 on the CPU, eager attention, eager experts. The truth of every equality test."""

    def __init__(self, path: Path) -> None:
        with quiet():
            import transformers

            self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
            ).eval()
        # Tests share their cores with the processes under test: a second thread here would spin in their way.
        torch.set_num_threads(1)
        self._answers: dict[tuple[tuple[int, ...], int, bool], list[int]] = {}

    @torch.no_grad()
    def prefill_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [T, V] in float32 of one pass over the ids."""
        with quiet():
            logits = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
        return logits[0].float()  # type: ignore[no-any-return]

    def greedy(self, ids: Sequence[int], n: int, *, ignore_eos: bool = True) -> list[int]:
        """The n ids that `generate` appends; fewer when an end-of-sequence token comes and is not ignored (it is included)."""
        key = (tuple(ids), n, ignore_eos)
        if key not in self._answers:
            self._answers[key] = self._generate(ids, n, ignore_eos)
        return list(self._answers[key])

    @torch.no_grad()
    def _generate(self, ids: Sequence[int], n: int, ignore_eos: bool) -> list[int]:
        prompt = torch.tensor([list(ids)])
        with quiet():
            import transformers

            eos = None if ignore_eos else self.model.config.eos_token_id
            config = transformers.GenerationConfig(do_sample=False, max_new_tokens=n, eos_token_id=eos, pad_token_id=EOS)
            self.model.generation_config = config
            out = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
        return out[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]

    def margins(self, ids: Sequence[int], n: int) -> float:
        """Smallest lead of the best logit over the second along the greedy path of n tokens."""
        path = [*ids, *self.greedy(ids, n)]
        best = self.prefill_logits(path[:-1])[len(ids) - 1 :].topk(2, dim=-1).values
        return float((best[:, 0] - best[:, 1]).min())
