from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forefetch import cli
from forefetch.errors import ConfigError
from forefetch.kernels.kv_codec import KvFormat, open_pages, seal
from forefetch.telemetry.ring import StepRing
from router_service.batch import StepBatch
from router_service.quality import __main__ as command
from router_service.quality.measure import Meter, Window
from router_service.quality.peers import PEERS, PIECE, layer_maker, runs
from router_service.quality.setups import BASELINES, DEFAULT, MinMaxCache, Setup, setups
from router_service.sealed import SealedCache

PAGE, DIM = 32, 16
LONG = [(7 * i * i + 3 * i) % 300 for i in range(300)]
IDS = LONG[:150]


def make(name: str, **options: int) -> Setup:
    return Setup(name, KvFormat(name, DIM, page=PAGE, **{"recent": 9, **options}))


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def meter(folder: Path) -> Meter:
    return Meter(folder, torch.device("cpu"), torch.float64)


def test_a_trunk_in_8_bits_is_measured_like_a_format(meter: Meter) -> None:
    plain, rounded = setups(["fp16", "int8-trunk"], KvFormat("e2m0", DIM, page=PAGE), 0, -1, frozenset())
    window = Window("text", LONG)
    found = meter.run([plain, rounded], [window], [64], lambda setup: None)
    assert found[0].cells[64].change.value == 0.0
    assert found[1].cells[64].nats == pytest.approx(float(meter.score(rounded, window)[0][32:64].sum()))
    assert meter.rounded.layers[0].qkv.shape == meter.trunk.layers[0].qkv.shape
    assert found[1].cells[64].change.value != 0.0
    exact, other = (meter.logits(setup, LONG)[32:64].softmax(-1) for setup in (plain, rounded))
    assert found[0].cells[64].divergence.value == 0.0
    assert found[1].cells[64].divergence.value == pytest.approx(float((exact * (exact / other).log()).sum(-1).mean()))


@pytest.mark.parametrize("name", ["e2m0", "fp4"])
def test_one_forward_says_what_decoding_token_by_token_would(name: str, meter: Meter) -> None:
    setup = make(name)
    whole = meter.logits(setup, IDS)
    assert setup.format is not None
    cache = SealedCache(meter.spec, setup.format, pages=8, lanes=1, max_rows=1, device=torch.device("cpu"))
    meter.trunk.cache = cache
    ring = StepRing(1, meter.spec.layers, 1)
    table = torch.arange(1, 7)[None]
    for position, token in enumerate(IDS):
        at = torch.tensor([position])
        batch = StepBatch(
            step=0,
            tokens=1,
            decodes=1,
            token_ids=torch.tensor([token]),
            positions=at,
            slots=at + PAGE,
            page_table=table,
            lengths=[position + 1],
            prefills=(),
            logit_rows=torch.tensor([0]),
            lanes=[0],
            loaded=[0],
        )
        logits = meter.trunk.forward(batch, meter._experts, ring.begin(0, 0))
        cache.commit(batch)
        # K and V differ in the last bits between a chunk and single rows, which may move a code by a level: a part of the
        # quantisation noise. A rule that reads other tokens sealed moves logits by far more.
        assert (logits[0] - whole[position]).norm() < 0.02 * whole[position].norm(), position


def test_a_wrong_rule_would_be_seen(meter: Meter) -> None:
    one, other = (meter.logits(make("e2m0", recent=recent), IDS) for recent in (9, 40))
    assert ((one - other).norm(dim=1) / one.norm(dim=1)).max() > 0.04


@pytest.mark.parametrize("name", list(BASELINES))
def test_baselines_near_float16(name: str, meter: Meter) -> None:
    setup = setups([name], KvFormat("e2m0", DIM, page=PAGE), 16, 9, frozenset())[0]
    plain, rough = meter.logits(Setup("fp16", None), IDS), meter.logits(setup, IDS)
    assert torch.allclose(plain[: PAGE + 9], rough[: PAGE + 9], atol=1e-3 * float(plain.abs().max()))
    assert 0 < (plain - rough).norm() < plain.norm()


@pytest.fixture
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quanto unpacks codes in Python: building its C++ for that, which says the same, takes a minute in a new environment."""
    if runs("hf-quanto2"):
        from optimum.quanto.library.extensions.extension import get_extension

        def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
            return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])

        monkeypatch.setattr(get_extension("quanto_cpp"), "_lib", SimpleNamespace(unpack=unpack))


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.parametrize("name", list(PEERS))
def test_peers_do_in_one_forward_what_they_do_token_by_token(name: str, meter: Meter) -> None:
    if not runs(name):
        pytest.skip("not installed")
    setup = setups([name], KvFormat("e2m0", DIM, page=PAGE), 16, 9, frozenset())[0]
    plain, rough = meter.logits(Setup("fp16", None), LONG), meter.logits(setup, LONG)
    near = 1e-3 * float(plain.abs().max())
    assert torch.allclose(plain[:PIECE], rough[:PIECE], atol=near), "the first piece is seen before it is rounded"
    error = (plain - rough)[PIECE:].norm() / plain[PIECE:].norm()
    assert 1e-4 < error < 1
    make, draw = layer_maker(name), torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 1, 2, 2 * PIECE + 5, 64, generator=draw)
    whole, single = make(), make()
    first = [whole.update(*(x[:, :, low : low + PIECE] for x in (k, v))) for low in (0, PIECE, 2 * PIECE)]
    single.update(k[:, :, :PIECE], v[:, :, :PIECE])
    for at in range(PIECE, 2 * PIECE + 5):
        seen = single.update(k[:, :, at : at + 1], v[:, :, at : at + 1])
        for mine, theirs in zip(first[at // PIECE], seen, strict=True):
            assert torch.equal(mine[:, :, : at + 1], theirs), at


def test_a_peer_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router_service.quality.peers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"forefetch\[peers\]"):
        setups(["hf-hqq2"], KvFormat("e2m0", 128), 16, -1, frozenset())


def test_bits_count_everything() -> None:
    spec = type("Spec", (), {"layers": 4})
    setup = Setup("e2m0", KvFormat("e2m0", 128, sinks=4, recent=112))
    assert setup.page_bits() == 2.34375
    # Lengths 3969 .. 4096: 30 pages sealed for the first 111, then 31. The tail is the rest, sinks are counted twice.
    held = sum(
        2.34375 * pages * 128 + 16 * (length - pages * 128 + 4)
        for length in range(3969, 4097)
        for pages in [(length - 112) // 128]
    )
    assert setup.bits(spec, 4096) == pytest.approx(held / sum(range(3969, 4097)))  # type: ignore[arg-type]
    half = Setup("e2m0", setup.format, exempt=frozenset([0, 1]))
    assert half.bits(spec, 4096) == pytest.approx((16 + setup.bits(spec, 4096)) / 2)  # type: ignore[arg-type]


def test_two_bit_formats_save_what_they_promise() -> None:
    spec = type("Spec", (), {"layers": 8})
    for setup in setups(DEFAULT, KvFormat("e2m0", 128), 16, -1, frozenset()):
        saved = 1 - setup.bits(spec, 4096) / 16  # type: ignore[arg-type]
        if setup.name in ("e2m0", "asym2", "mixed"):
            assert saved >= 0.8
        if setup.name == "fp4":
            assert saved >= 0.7


def test_fp4_errs_less_than_min_max_in_no_more_bytes() -> None:
    """Gaussian values, as those of V are: 0.95 dB less error; E2M1's levels would have 0.1 dB more."""
    fp4, baseline = setups(["fp4", "kivi4-g64"], KvFormat("e2m0", 128), 0, -1, frozenset())
    assert fp4.format is not None
    assert baseline.format is not None
    assert fp4.page_bits() <= baseline.page_bits()
    values = torch.randn(4, 128, 128, generator=torch.Generator().manual_seed(9)).half().float()
    _, own = open_pages(seal(values, values, fp4.format), fp4.format)
    theirs = MinMaxCache(baseline.format, frozenset(), 4, 64, 64).rounded(values, 64)
    assert (values - own).square().sum() < 10**-0.08 * (values - theirs).square().sum()


def test_min_max_leaves_exempt_layers_alone(meter: Meter) -> None:
    everything = frozenset(range(meter.spec.layers))
    plain = meter.logits(Setup("fp16", None), IDS)
    for exempt, same in ((everything, True), (everything - {1}, False)):
        setup = setups(["kivi2"], KvFormat("e2m0", DIM, page=PAGE), 16, 9, exempt)[0]
        assert torch.allclose(plain, meter.logits(setup, IDS), atol=1e-3 * float(plain.abs().max())) == same


@pytest.mark.parametrize("name", ["int8", "e2m0:recent", "e2m0:outliers=9"])
def test_formats_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--formats"):
        setups([name], KvFormat("e2m0", 128), 16, -1, frozenset())


def test_the_command_prints_what_it_measured(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = tmp_path / "tale.txt"
    text.write_text("The router keeps the attention, the workers keep the experts. " * 40)
    flags = ["--model", str(folder), "--text", str(text), "--contexts", "64,128", "--page-size=32", "--recent=9", "--threads=1"]
    picture = tmp_path / "p.png"
    assert command.main([*flags, "--tokens=128", "--formats=fp16,e2m0,kivi2", "--json", f"--plot={picture}"]) == 0
    rows = json.loads(capsys.readouterr().out)
    keys = {"format", "bits", "context", "ppl", "ppl_fp16", "greedy_agreement", "divergence", "divergence_interval"}
    assert all(keys <= set(row) for row in rows)
    assert [(row["format"], row["context"]) for row in rows] == list(product(("fp16", "e2m0", "kivi2"), (64, 128)))
    for row in rows:
        assert set(row["texts"]) == {"tale"}
        assert row["texts"]["tale"]["ppl"] == row["ppl"]
        if row["format"] == "fp16":
            assert (row["ppl"], row["greedy_agreement"]) == (row["ppl_fp16"], 1.0)
        assert row["divergence_interval"] is None, "less than two blocks"
        assert row["min_max"] is None, "pages of 16 channels and 32 tokens are mostly padding"
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert command.main([*flags, "--tokens=128", "--formats=e2m0", "--layers"]) == 0
    assert "e2m0 layer 2" in capsys.readouterr().out


def test_too_little_text_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    assert command.main(["--model", str(folder), "--text", str(tmp_path / "short.txt"), "--page-size=32"]) == 2
    assert "a window of the longest context takes 256" in capsys.readouterr().err


def test_the_cli_hands_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        cli.quality.subprocess, "run", lambda command, check: seen.append(command) or subprocess.CompletedProcess(command, 0)
    )
    flags = ["--formats", "e2m0", "--exempt-layers", "0,1", "--plot", "a.png", "--layers", "--json"]
    assert cli.main(["quality", "--model", "m", "--text", "a", "b", *flags]) == 0
    assert seen == [
        [
            *(sys.executable, "-m", "router_service.quality", "--model", "m", "--text", "a", "b"),
            *("--formats=e2m0", "--exempt-layers=0,1", "--plot=a.png", "--layers", "--json"),
        ]
    ]
