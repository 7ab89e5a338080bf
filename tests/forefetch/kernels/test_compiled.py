"""Compiled kernels against float64, with tolerances that follow from the arithmetic; memory around results is poisoned."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from waiting import until

from forefetch.kernels import compiled
from forefetch.kernels.gate import choose as choose_by_definition

pytestmark = pytest.mark.skipif(not compiled.available(), reason="Numba is not installed")
if compiled.available():
    import numba

    from forefetch.kernels.compiled import experts, layer, linear, maths
    from forefetch.kernels.compiled.crew import ARGUMENTS, NEVER, Crew, finish, join, post, rest, take, wake
    from forefetch.kernels.compiled.linear import BFLOAT16, FLOAT32, Packed, padded, product_panel
    from forefetch.kernels.compiled.locks import compiling, threads
    from forefetch.kernels.compiled.simd import address_of, longs_at
    from forefetch.kernels.compiled.toolchain import compiled as decorated
    from forefetch.kernels.compiled.toolchain import entry

    choose, sort_pairs = entry(layer.choose), entry(experts.sort_pairs)
    matrix_times, product = entry(linear.matrix_times), entry(linear.product)
    rms_norm, softmax = entry(maths.rms_norm), entry(maths.softmax)

    def assisting(do):  # type: ignore[no-untyped-def]
        """A helper that does `do` with every item."""

        @entry
        @decorated()
        def assist(board, number):  # type: ignore[no-untyped-def]
            while rest(board, number, address_of(board) + 8 * NEVER):
                item = take(board)
                while item >= 0:
                    do(board, item)
                    finish(board)
                    item = take(board)

        return assist

    @decorated()
    def count_one(board, item):  # type: ignore[no-untyped-def]
        cells = numba.carray(longs_at(board[ARGUMENTS]), board[ARGUMENTS + 1])
        cells[item] += 1

    panels, counting = assisting(product_panel), assisting(count_one)

    @entry
    @decorated()
    def count_all(board, cells, jobs):  # type: ignore[no-untyped-def]
        for job in range(jobs):
            board[ARGUMENTS], board[ARGUMENTS + 1] = address_of(cells[job]), len(cells[job])
            wake(board)
            post(board, 0, len(cells[job]))
            item = take(board)
            while item >= 0:
                count_one(board, item)
                finish(board)
                item = take(board)
            join(board, len(cells[job]))

    @entry
    @decorated()
    def exp_of(x, out):  # type: ignore[no-untyped-def]
        for i in range(len(x)):
            out[i] = maths.exp(x[i])


Floats = npt.NDArray[np.float32]
U = 2.0**-24


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def allowed(x: Floats, w: Floats) -> npt.NDArray[np.float64]:
    """A sum of n products in float32 is off by at most n u |x| |w|, in any order."""
    return (len(w) + 2) * U * (np.abs(x).astype(np.float64) @ np.abs(w))


SHAPES = [(1, 1, 1), (2, 3, 5), (3, 16, 64), (4, 7, 65), (5, 64, 128), (9, 31, 200), (33, 128, 96)]


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_the_definition_and_touch_nothing_else(shape: tuple[int, int, int], kind: str) -> None:
    rows, inputs, outputs = shape
    matrix = torch.from_numpy(normal(inputs, outputs, seed=1))
    stored = matrix.to(getattr(torch, kind))
    w = stored.float().numpy()
    x = normal(rows + 2, inputs, seed=2)
    which = np.random.default_rng(3).permutation(rows + 2)[:rows]
    out = np.full((rows + 2, outputs + 3), np.nan, dtype=np.float32)
    out[1:-1, 1 : outputs + 1] = 0.5
    code = BFLOAT16 if kind == "bfloat16" else FLOAT32
    ld = 4 * (outputs + 3)
    at, to = stored.data_ptr(), out[1:, 1:].ctypes.data
    matrix_times(x.ctypes.data, 4 * inputs, which, at, stored.element_size() * outputs, code, inputs, outputs, to, ld)
    expected = 0.5 + x[which].astype(np.float64) @ w
    assert (np.abs(out[1:-1, 1 : outputs + 1] - expected) <= allowed(x[which], w) + U).all()
    out[1:-1, 1 : outputs + 1] = np.nan
    assert np.isnan(out).all()


@pytest.mark.parametrize("helpers", [0, 2])
@pytest.mark.parametrize("shape", [*SHAPES, (8, 512, 2048)], ids=str)
def test_packed_products_with_bias(shape: tuple[int, int, int], helpers: int) -> None:
    rows, inputs, outputs = shape
    x, matrix, bias = normal(rows, inputs, seed=4), torch.from_numpy(normal(inputs, outputs, seed=5)), normal(outputs, seed=6)
    packed = Packed.of(matrix)
    assert packed.kind == FLOAT32
    out = np.full((rows, padded(outputs)), np.nan, dtype=np.float32)
    crew = Crew(helpers, panels)
    product(x, packed.memory.data_ptr(), packed.kind, out, np.arange(rows), outputs, bias.ctypes.data, crew.board)
    error = np.abs(out[:, :outputs] - (x.astype(np.float64) @ matrix.numpy() + bias))
    assert (error <= allowed(x, matrix.numpy()) + 2 * U * np.abs(bias)).all()


def test_a_matrix_is_narrow_only_if_nothing_is_lost() -> None:
    exact = torch.randn(5, 70).bfloat16().float()
    assert Packed.of(exact).kind == BFLOAT16
    exact[3, 2] += 1e-6
    assert Packed.of(exact).kind == FLOAT32


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    x, packed = normal(9, 77, seed=7), Packed.of(torch.from_numpy(normal(77, 130, seed=8)).bfloat16())

    nobody = Crew(0, panels).board

    def times(rows: Floats) -> Floats:
        out = np.empty((len(rows), padded(130)), dtype=np.float32)
        product(np.ascontiguousarray(rows), packed.memory.data_ptr(), packed.kind, out, np.arange(9), 130, np.int64(0), nobody)
        return out[:, :130]

    alone = np.concatenate([times(x[i : i + 1]) for i in range(9)])
    for count in range(1, 10):
        assert np.array_equal(times(x[:count]), alone[:count])


def test_exp() -> None:
    x = np.concatenate([np.linspace(-60, 88, 200_001), [0.0, -1e-30]]).astype(np.float32)
    out = np.empty_like(x)
    exp_of(x, out)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) / exact).max() <= 2.5 * 2**-23  # two units in the last place, and one half for storing it
    special, out = np.array([np.nan, np.inf, -np.inf, -1e30], dtype=np.float32), np.empty(4, dtype=np.float32)
    exp_of(special, out)
    assert np.isnan(out[0])
    assert out[1] > 1e38
    assert (out[2:] == 0).all()  # and nothing subnormal, ever


@pytest.mark.parametrize("count", [1, 7, 16, 100])
def test_softmax_and_norm(count: int) -> None:
    x, weight = 8 * normal(count, seed=9), normal(count, seed=10)
    line = x.copy()
    shares = line * softmax(line)
    torch.testing.assert_close(torch.from_numpy(shares).double(), torch.from_numpy(x).double().softmax(0), atol=0, rtol=1e-5)
    out = np.empty_like(x)
    rms_norm(x, weight, np.float32(1e-6), out)
    exact = torch.nn.functional.rms_norm(torch.from_numpy(x).double(), (count,), torch.from_numpy(weight).double(), 1e-6)
    torch.testing.assert_close(torch.from_numpy(out).double(), exact, atol=0, rtol=(count + 8) * U)


@pytest.mark.parametrize("over_chosen", [False, True])
def test_the_choice_is_the_gates(over_chosen: bool) -> None:
    logits = normal(50, 13, seed=11)
    ids, weights, taken = np.empty(5, dtype=np.int64), np.empty(5, dtype=np.float32), np.empty(13, dtype=np.bool_)
    expected_ids, expected = choose_by_definition(torch.from_numpy(logits), 5, "softmax_topk", over_chosen)
    for row in range(50):
        choose(logits[row], taken, over_chosen, ids, weights)
        assert ids.tolist() == expected_ids[row].tolist()
        torch.testing.assert_close(torch.from_numpy(weights), expected[row], atol=0, rtol=2e-6)


def test_a_broken_gate_still_names_different_experts() -> None:
    ids, weights, taken = np.empty(3, dtype=np.int64), np.empty(3, dtype=np.float32), np.empty(4, dtype=np.bool_)
    for line in ([np.nan] * 4, [np.inf, np.inf, 0, np.nan], [-np.inf] * 4):
        choose(np.array(line, dtype=np.float32), taken, True, ids, weights)
        assert len(set(ids.tolist())) == 3
        assert np.isnan(weights).any()


def test_pairs_are_sorted_by_expert_and_keep_their_order() -> None:
    draw = np.random.default_rng(12)
    ids = np.stack([draw.permutation(9)[:4] for _ in range(7)])
    ids[ids == 5] = 8  # nobody asks for 5; 8 may be asked for twice
    rows, place, slots = (np.full(size, -7, dtype=np.int64) for size in (28, 28, 9))
    first = np.full(10, -7, dtype=np.int64)
    found = sort_pairs(ids, np.arange(9) + 100, rows, place, first, slots)
    order = ids.ravel().argsort(kind="stable")
    present, counts = np.unique(ids, return_counts=True)
    assert found == len(present)
    assert slots[:found].tolist() == (present + 100).tolist()
    assert first[: found + 1].tolist() == [0, *counts.cumsum()]
    assert rows.tolist() == (order // 4).tolist()
    assert place[order].tolist() == list(range(28))


def test_only_one_caller_at_a_time_gets_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.config.NUMBA_NUM_THREADS", 3)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads() as first, threads() as second:
            assert (first, second) == (2, 1)
        with threads() as again:
            assert again == 2
        torch.set_num_threads(1)
        with threads() as never:
            assert never is None
    finally:
        torch.set_num_threads(before)


def test_a_crew_does_every_item_once_and_leaves() -> None:
    crew = Crew(2, counting)
    for _ in range(20):  # between two rounds helpers may fall asleep
        cells = np.zeros((50, 37), dtype=np.int64)
        count_all(crew.board, cells, 50)
        assert (cells == 1).all()
        time.sleep(0.001)
    crew.dismiss()

    def gone() -> bool:
        gc.collect()  # crews of other tests
        return not any(thread.name == "crew" for thread in threading.enumerate())

    until(gone)


def test_one_compiles_while_others_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("forefetch.kernels.compiled.locks.FOLDER", tmp_path / "kernels")
    inside: list[str] = []

    def other() -> None:
        with compiling():
            inside.append("other")

    with compiling():
        waiting = threading.Thread(target=other)
        waiting.start()
        waiting.join(0.2)
        inside.append("first")
    waiting.join(60.0)
    assert inside == ["first", "other"]
    monkeypatch.setattr("forefetch.kernels.compiled.locks.FOLDER", tmp_path / "kernels" / "compiling" / "none")
    with compiling():  # nowhere to put a lock
        inside.append("alone")
    assert inside[-1] == "alone"


def test_python_cannot_call_what_is_part_of_others() -> None:
    x = normal(4)
    exp_of(x, np.empty_like(x))
    with pytest.raises(TypeError):
        maths.exp(x[0])
