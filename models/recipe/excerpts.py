"""Text of the recipe's documents as files: `python -m models.recipe.excerpts --data data --out text --tokens 300000`.

Writes `{domain}.txt`, windows of training documents (never of held-out ones), each closed by the end-of-text token on a line
end, as `forefetch lookahead train --text` reads them. Short windows of many documents rather than a few long documents.

With `--heldout`, whole held-out documents in their order, without those that ship in `heldout/`: far more text that no choice
was made on, for `forefetch quality`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from models.recipe import pack
from models.recipe.conversation import END_OF_TEXT
from models.recipe.corpus import DOMAINS

WINDOW = 512
SHORTEST = 32


def windows(stream: pack.Stream, tokens: int, seed: int) -> Iterator[list[int]]:
    """Up to WINDOW tokens of each of as many documents as make `tokens`: half from a beginning, half from anywhere."""
    rng, total = np.random.default_rng(seed), 0
    ends = np.append(stream.starts[1:], len(stream.tokens)) - 1  # without the end-of-text token
    for document in rng.permutation(len(ends)):
        first, last = int(stream.starts[document]), int(ends[document])
        length = min(WINDOW, last - first)
        if length < SHORTEST:
            continue
        if rng.random() < 0.5:
            first += int(rng.integers(0, last - first - length + 1))
        yield stream.tokens[first : first + length].tolist()
        total += length
        if total >= tokens:
            return


def unshipped(stream: pack.Stream, tokenizer: Tokenizer, shipped: str, tokens: int) -> Iterator[str]:
    """Documents in their order that `shipped` does not have, as many as make `tokens`."""
    total = 0
    for first, last in pairwise([*stream.starts.tolist(), len(stream.tokens)]):
        ids = stream.tokens[first : last - 1].tolist()  # without the end-of-text token
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if text in shipped:
            continue
        yield text
        total += len(ids)
        if total >= tokens:
            return


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what models.recipe.prepare wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=300_000, help="tokens of each domain (%(default)s)")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=list(DOMAINS))
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--heldout", action="store_true", help="whole held-out documents that do not ship with the model")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(arguments.data / "tokenizer.json"))
    for domain in arguments.domains:
        stream = pack.load(arguments.data, f"{'heldout' if arguments.heldout else 'training'}-{domain}")
        if arguments.heldout:
            shipped = (arguments.data / f"{domain}.txt").read_text(encoding="utf-8")
            texts = list(unshipped(stream, tokenizer, shipped, arguments.tokens))
        else:
            chosen = windows(stream, arguments.tokens, arguments.seed)
            texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in chosen]
        (arguments.out / f"{domain}.txt").write_text("".join(f"{text}{END_OF_TEXT}\n" for text in texts), encoding="utf-8")


if __name__ == "__main__":
    main()
