"""The shipped model is what its card says, and the recipe's parts do what they claim."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the recipe runs from the repository's root and is no installed package

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from models.recipe import batches, code, conversation, corpus, dedup, evaluate, export, optimizer, pack, prose  # noqa: E402
from models.recipe.model import Model, ModelConfig  # noqa: E402

FOLDER = ROOT / "models" / "reference"
TINY = ModelConfig(vocabulary=320, hidden=128, layers=2, heads=2, kv_heads=1, experts=8, top_k=2, expert_width=32)
shipped = pytest.mark.skipif(not (FOLDER / "model.safetensors").exists(), reason="weights are not in this checkout")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "eval.json").read_text()))


@pytest.fixture(scope="module")
def hf_model() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def hf_tokenizer() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(FOLDER)


def random_model(config: ModelConfig) -> Model:
    torch.manual_seed(0)
    model = Model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
            parameter.copy_(parameter.bfloat16().float())
    return model


# --- the folder


@shipped
def test_folder_is_small_and_complete() -> None:
    files = [p for p in (ROOT / "models").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(p.stat().st_size for p in files) <= 64 << 20
    names = {p.name for p in FOLDER.iterdir()}
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert wanted | {"chat_template.jinja", "README.md", "eval.json", "heldout"} <= names


@shipped
def test_config_is_one_the_gpu_kernels_serve() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Qwen3MoeForCausalLM"], "qwen3_moe")
    assert (config["num_experts"], config["num_experts_per_tok"], config["head_dim"]) == (64, 8, 128)
    assert config["num_hidden_layers"] >= 8
    assert config["max_position_embeddings"] >= 4096
    assert config["hidden_size"] % 128 == 0
    assert config["moe_intermediate_size"] % 32 == 0
    assert config["num_key_value_heads"] < config["num_attention_heads"]


@shipped
@pytest.mark.parametrize("domain", corpus.DOMAINS)
def test_transformers_repeats_the_recorded_perplexity(
    domain: str, record: dict[str, Any], hf_model: Any, hf_tokenizer: Any
) -> None:
    texts = evaluate.read_excerpt(FOLDER, domain)
    stream = "".join(t + conversation.END_OF_TEXT for t in texts)
    ids = torch.tensor([hf_tokenizer(stream, add_special_tokens=False)["input_ids"][: record["snippet"] + 1]])
    with torch.no_grad():
        nats = float(hf_model(ids, labels=ids).loss)
    # Same fp32 arithmetic in another order, recorded with four decimals; a router tie that flips moves one token.
    assert nats == pytest.approx(record["excerpts"][domain]["snippet_nats"], abs=5e-3)


@shipped
def test_training_forward_gives_the_logits_of_transformers(hf_model: Any) -> None:
    ids = torch.randint(3, 8192, (1, 96), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours, theirs = evaluate.read_model(FOLDER).logits(ids), hf_model(ids).logits
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-4


@shipped
def test_perplexity_is_that_of_a_trained_model(record: dict[str, Any]) -> None:
    for domain, numbers in record["excerpts"].items():
        assert numbers["bits_per_byte"] < 1.5, domain  # raw text of these kinds compresses to about 2 with gzip


@shipped
def test_no_expert_is_dead_on_heldout_text() -> None:
    model = evaluate.read_model(FOLDER)
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    loads = torch.zeros(model.config.layers, model.config.experts)
    for domain in corpus.DOMAINS:
        ids = tokenizer.encode("\n".join(evaluate.read_excerpt(FOLDER, domain))).ids[:2048]
        with torch.no_grad():
            _, routing = model.trunk(torch.tensor(ids).view(2, -1))
        loads += torch.stack([r.counts for r in routing])
    assert float(loads.min()) > 0
    assert bool((loads.amax(1) < 4 * loads.mean(1)).all())


@shipped
def test_chat_template_renders_what_the_model_was_trained_on(hf_tokenizer: Any) -> None:
    chat = [conversation.Turn("user", "Hello."), conversation.Turn("assistant", "Hi!")]
    messages = [{"role": "system", "content": "Mozart or Beethoven?"}] + [{"role": t.role, "content": t.text} for t in chat]
    rendered = hf_tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == conversation.render_chat("Mozart or Beethoven?", chat)
    prompt = hf_tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>assistant\n")


@shipped
def test_special_tokens_are_single_ids(hf_tokenizer: Any) -> None:
    texts = (conversation.END_OF_TEXT, conversation.IM_START, conversation.IM_END)
    assert [hf_tokenizer.encode(t, add_special_tokens=False) for t in texts] == [[0], [1], [2]]
    assert hf_tokenizer.eos_token_id == 2


@shipped
@pytest.mark.parametrize("text", ["", " ", "naïve café", "日本語 🙂\u200d\n\t x", "\x00\x7f\u0301", "a  b\r\n\r\n    return"])
def test_tokenizer_round_trips_any_text(text: str, hf_tokenizer: Any) -> None:
    assert hf_tokenizer.decode(hf_tokenizer.encode(text, add_special_tokens=False)) == text


# --- the recipe


def test_training_forward_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import save_file

    model = random_model(TINY)
    save_file(export.hugging_face_tensors(model), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(export.hugging_face_config(TINY)))
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 320, (2, 41), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model.logits(ids), twin(ids).logits, rtol=1e-4, atol=1e-4)
    loss, _ = model(ids)
    loss.backward()
    twin(ids, labels=ids).loss.backward()
    wanted = twin.model.layers[0].mlp.gate.weight.grad
    torch.testing.assert_close(model.blocks()[0].router.grad, wanted, rtol=1e-3, atol=1e-6)


def test_exported_names_load_back(tmp_path: Path) -> None:
    first, second = random_model(TINY), Model(TINY)
    for path in export.save_parts(first, tmp_path):
        assert path.stat().st_size <= export.PART_BYTES + 2**20
    export.load_hugging_face(second, export.hugging_face_tensors(first))
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_balance_loss_is_one_when_even_and_counts_cover_every_choice() -> None:
    model = random_model(TINY)
    layer = model.blocks()[0]
    with torch.no_grad():
        layer.router.zero_()
    _, counts, balance, _ = layer.experts(torch.randn(50, TINY.hidden))
    assert int(counts.sum()) == 50 * TINY.top_k
    assert float(balance.detach()) == pytest.approx(1.0, abs=1e-5)


def test_muon_update_is_nearly_orthogonal() -> None:
    values = torch.linalg.svdvals(optimizer.orthogonalize(torch.randn(3, 32, 64)))
    assert 0.5 < float(values.min()) < float(values.max()) < 1.3


def test_schedule_warms_up_and_ends_at_zero() -> None:
    rates = [optimizer.learning_rate(s, p, 1.0) for s, p in ((0, 0.0), (50, 0.01), (500, 0.2), (900, 0.7), (999, 1.0))]
    assert 0 < rates[0] < rates[1] < rates[2] == 1.0 > rates[3] > rates[4] == 0.0


def test_near_duplicates_keep_the_first_and_leave_the_rest() -> None:
    words = [f"word{i}" for i in range(400)]
    original, other = " ".join(words), " ".join(reversed(words))
    edited = " ".join([*words[:200], "changed", *words[201:]])
    assert dedup.near_duplicates([original, other, edited, original]) == [2, 3]


def test_contained_finds_a_copied_passage_only() -> None:
    corpus_text = " ".join(f"w{i}" for i in range(500))
    copied = "intro " + " ".join(f"w{i}" for i in range(100, 200))
    fresh = " ".join(f"v{i}" for i in range(100))
    assert dedup.contained([fresh, copied], [corpus_text]) == [1]
    assert dedup.contained([fresh], []) == []


def test_split_is_a_function_of_the_document_and_shares_nothing() -> None:
    documents = [corpus.Document("code", "p", f"f{i}.py", " ".join(f"t{i}x{j}" for j in range(60))) for i in range(600)]
    training, held_out = corpus.split(documents)
    assert {d.key for d in training}.isdisjoint(d.key for d in held_out)
    assert 1 <= len(held_out) <= 20
    assert corpus.split(documents[::-1])[1] == held_out[::-1]


def test_split_drops_a_held_out_copy_of_a_training_text() -> None:
    documents = [corpus.Document("code", "p", f"f{i}.py", " ".join(f"t{j}" for j in range(60))) for i in range(600)]
    assert corpus.split(documents)[1] == []


def test_window_starts_snap_to_documents_and_stay_inside() -> None:
    stream = pack.Stream(np.arange(1000, dtype=np.uint16), np.arange(0, 1000, 10), 1000)
    source = batches.window_starts(stream, 64, 1.0, np.random.default_rng(0))
    starts = [next(source) for _ in range(100)]
    assert all(0 <= s <= 1000 - 64 for s in starts)
    assert all(s % 10 == 0 or s == 1000 - 64 for s in starts)
    assert batches.apportion({"a": 0.14, "b": 0.46, "c": 0.4}, 32) == {"a": 4, "b": 15, "c": 13}


@pytest.mark.parametrize("shard", [1, 4, 5, 9, 100])
def test_streams_survive_the_disk(shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "SHARD_TOKENS", shard)
    stream = pack.Stream(np.arange(9, dtype=np.uint16), np.asarray([0, 4, 5, 8]), 20)
    assert len(pack.save(stream, tmp_path, "s")) == {1: 4, 4: 3, 5: 2, 9: 1, 100: 1}[shard]
    again = pack.load(tmp_path, "s")
    assert again.tokens.tolist() == list(range(9))
    assert (again.starts.tolist(), again.text_bytes) == ([0, 4, 5, 8], 20)


def test_conversation_merges_turns_and_tidies_spelling() -> None:
    def said(sender: str, text: str, at: int) -> dict[str, str]:
        return {"sender": sender, "text": text, "timestamp": f"2018-01-01T00:00:{at:02}Z"}

    raw = {"prompt": None, "messages": [[said("a", "hello", 1), said("a", "im  fine", 2)], [said("b", "i dont know?", 3)]]}
    assert conversation.turns(raw) == [
        conversation.Turn("user", "Hello. I'm fine."),
        conversation.Turn("assistant", "I don't know?"),
    ]
    assert conversation.chat_document(raw) is None  # two turns are no conversation


def test_prose_keeps_sentences_and_listings_and_drops_menus() -> None:
    page = (
        "<head><title>x</title></head><body><nav>menu</nav><h1>Title</h1><p>One <b>sentence</b>.</p>"
        "<ul><li><p>item</p></li><li><a href=x>only a link</a></li></ul><pre>a\n  b</pre><table><tr><td>cell</table></body>"
    )
    assert prose.render(prose.html_blocks(page)) == "Title\n\nOne sentence.\n\n- item\n\na\n  b\n"
    blocks = prose.pod_blocks("=head1 NAME\n\nUse C<my $x> or L<the page|perl>.")
    assert [b.text for b in blocks] == ["NAME", "Use my $x or the page."]


def test_code_loses_its_licence_header_and_must_parse() -> None:
    body = "def function(argument):\n    return argument\n" * 12
    assert code.clean("# Copyright 2020\n# Licensed under X\n\n" + body) == body
    assert code.clean(body + "def broken(:\n") is None
    assert code.clean("# This file is auto-generated\n" + body) is None
