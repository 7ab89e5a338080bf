"""What the two commands do: record and train; run and score. Progress goes to the console given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from forefetch.errors import ConfigError, UnsupportedModel
from router_service.lookahead import corpus, foresight, store
from router_service.lookahead.calibrate import Walker
from router_service.lookahead.corpus import Chunk
from router_service.lookahead.estimate import Estimator
from router_service.lookahead.evaluate import Evaluator, Scores
from router_service.lookahead.record import Recorder, Trace
from router_service.lookahead.runner import Runner
from router_service.lookahead.store import Trained
from router_service.lookahead.train import Options, Tasks, distil, train_head
from router_service.text import Text

SEQUENCES = {"cpu": 32, "cuda": 192}  # at most, in one forward
ROWS = {"cpu": 4096, "cuda": 16_384}
CALIBRATED_ON = 32  # documents kept aside
PROMPT = 32  # tokens of a text that the model goes on from
CONTINUATION = 256


@dataclass(frozen=True)
class Source:
    """Which checkpoint, and how much of which text. `tokens` 0: all of it."""

    model: Path
    texts: Sequence[Path]
    tokens: int
    context: int
    separator: str
    device: torch.device

    def runner(self) -> Runner:
        """The model, in float32."""
        if self.tokens < 0 or self.context < 2 * corpus.SHORTEST:
            raise ConfigError(f"--tokens must not be negative, --context must be at least {2 * corpus.SHORTEST}")
        return Runner(self.model, sequences=SEQUENCES[self.device.type], length=self.context, device=self.device)

    def chunks(self, path: Path, length: int, most: int) -> list[Chunk]:
        """One file's text. ConfigError when it is too short, UnsupportedModel without a tokenizer."""
        text = Text.load(self.model)
        if text is None:
            raise UnsupportedModel("tokenizer.json: not found in the model's folder")
        found = list(corpus.chunks(text, corpus.read_documents(path, self.separator), length, most or 2**62))
        if not found:
            raise ConfigError(f"--text {path.name}: no document of at least {corpus.SHORTEST} tokens")
        return found


def progress(console: Console) -> Progress:
    """A bar with a count and the time left."""
    columns = TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console)


def train(source: Source, generate: int, temperature: float, options: Options, console: Console) -> tuple[Path, Trained]:
    """Records text and the model's own continuations, trains, chooses, and writes the file."""
    runner = source.runner()
    share = source.tokens // len(source.texts)
    texts = [chunk for path in source.texts for chunk in source.chunks(path, runner.length, share)]
    with progress(console) as bars:
        own = _continuations(runner, texts, generate, temperature, bars)
        recorder = _record(runner, texts + own, bars)
        trace = recorder.trace
        trained = Trained(recorder.mean_outputs(), {n: load / trace.rows for n, load in recorder.load.items()})
        trained.foresight = foresight.fit(runner.trunk, trace)
        learn(runner, trace, trained, options, bars)
        aside = corpus.kept_aside(texts + own)
        _calibrate(runner, [chunk for chunk in texts if chunk.document in aside], trained, bars)
    return store.save(trained, source.model, runner.checkpoint.digest), trained


def learn(runner: Runner, trace: Trace, trained: Trained, options: Options, bars: Progress) -> None:
    """Sketches first, then the heads that stand on them."""
    tasks = Tasks(runner.trunk, trace, Estimator(runner.trunk, trained.outputs))
    for layer in bars.track(list(trained.outputs), description="sketching experts") if options.distilled else ():
        trained.sketches[layer] = distil(tasks, layer, runner.experts.weights(layer), options)
    tasks = Tasks(runner.trunk, trace, Estimator(runner.trunk, trained.outputs, trained.sketches))
    for layer, distance, target in bars.track(list(tasks.keys()), description="training heads"):
        head, recall = train_head(tasks.task(layer, distance, target), options)
        trained.heads[layer, distance], trained.recall[layer, distance] = head, recall


def _calibrate(runner: Runner, parts: Sequence[Chunk], trained: Trained, bars: Progress) -> None:
    """Hints with attention can only be judged as a router makes them: token by token."""
    walker = Walker(trained.on(runner.trunk))
    count = min(CALIBRATED_ON, len(parts))
    spread = [parts[place * len(parts) // count] for place in range(count)]  # over all texts
    group = sorted((chunk.ids[:CONTINUATION] for chunk in spread), key=len, reverse=True)
    for _ in bars.track(runner.follow(group, walker), total=len(group[0]), description="calibrating"):
        pass
    for key, (head, recall) in walker.heads(runner.spec.top_k).items():
        trained.heads[key], trained.recall[key] = head, recall


def _continuations(runner: Runner, texts: Sequence[Chunk], tokens: int, temperature: float, bars: Progress) -> list[Chunk]:
    """`tokens` of the model's own, behind beginnings of texts; each belongs to its beginning's document."""
    count, length = -(-tokens // CONTINUATION), min(CONTINUATION, runner.length - PROMPT)
    usable = [chunk for chunk in texts if len(chunk.ids) > PROMPT] if length > 0 else []
    chosen = [usable[int(place * len(usable) / count)] for place in range(count)] if usable else []
    found = []
    groups = [chosen[at : at + runner.sequences] for at in range(0, len(chosen), runner.sequences)]
    for number, group in enumerate(bars.track(groups, description="generating")):
        prompts = [chunk.ids[:PROMPT] for chunk in group]
        answers = runner.generate(prompts, length, temperature, seed=1000 * number)
        found += [Chunk(chunk.document, ids) for chunk, ids in zip(group, answers, strict=True)]
    return found


def _record(runner: Runner, parts: Sequence[Chunk], bars: Progress) -> Recorder:
    recorder = Recorder(runner.trunk, sum(len(chunk.ids) for chunk in parts), runner.device)
    groups, aside = list(corpus.batches(parts, runner.sequences, ROWS[runner.device.type])), corpus.kept_aside(parts)
    for group in bars.track(groups, description="recording"):
        recorder.begin(group, aside)
        runner.prefill([chunk.ids for chunk in group], recorder)
    return recorder


def evaluate(source: Source, console: Console) -> dict[str, Scores]:
    """Domain (a file's stem) -> scores."""
    runner = source.runner()
    trained = store.load(source.model, runner.checkpoint.digest, runner.spec.moe_layers)
    found: dict[str, Scores] = {}
    with progress(console) as bars:
        for path in source.texts:
            evaluator = Evaluator(runner.trunk, trained)
            parts = sorted(source.chunks(path, runner.length, source.tokens), key=lambda chunk: len(chunk.ids), reverse=True)
            task = bars.add_task(path.stem, total=sum(len(chunk.ids) for chunk in parts))
            for group in corpus.batches(parts, runner.sequences, runner.sequences * runner.length):
                evaluator.begin()
                for rows in runner.follow([chunk.ids for chunk in group], evaluator):
                    bars.advance(task, rows)
            found[path.stem] = evaluator.scores
    return found
