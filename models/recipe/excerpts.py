"""Text that lookahead heads are trained on: `python -m models.recipe.excerpts --data data --out text --tokens 300000`.

Writes `{domain}.txt`, windows of training documents (never of held-out ones), each closed by the end-of-text token on a line
end, as `forefetch lookahead train --text` reads them. Short windows of many documents rather than a few long documents.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what models.recipe.prepare wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=300_000, help="tokens of each domain (%(default)s)")
    parser.add_argument("--domains", nargs="+", default=list(DOMAINS), choices=list(DOMAINS))
    parser.add_argument("--seed", type=int, default=3)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(arguments.data / "tokenizer.json"))
    for domain in arguments.domains:
        stream = pack.load(arguments.data, f"training-{domain}")
        texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in windows(stream, arguments.tokens, arguments.seed)]
        (arguments.out / f"{domain}.txt").write_text("".join(f"{text}{END_OF_TEXT}\n" for text in texts), encoding="utf-8")


if __name__ == "__main__":
    main()
