"""What fewer bits of attention's weights and cache cost in exactness, and bring in time and memory.

    OMP_NUM_THREADS=1 python -m benchmarks.models.precisions smollm2
    OMP_NUM_THREADS=1 python -m benchmarks.models.precisions minilm

SmolLM2 reads a text: the better it expects each next token, the lower its perplexity. MiniLM embeds
a text's passages: of each, the cosine between its embedding and that of float32 weights is 1 where
nothing is lost. Both take their turns in every precision; ratios are medians of those within one
round. Only attention's weights and cache change: all else is NumPy's, in float32.
"""

import argparse
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.models import WEIGHTS, smollm2
from benchmarks.models.fetch import MINILM, SMOLLM2, FetchError, fetch
from benchmarks.models.minilm import MiniLM, split_passages
from tileattn.bench.rounds import Turn, interleave, ratio
from tileattn.weights import WeightsError

README = Path(__file__).parents[2] / "README.md"
MAX_TOKENS = 2048  # of a text, for SmolLM2
ANSWER = 32  # the last of them are timed one at a time, as an answer is written,
PROMPT = 512  # and those before them all at once
MAX_PASSAGES = 32  # of a text, for MiniLM
FLOAT32 = "float32"

#: Every kind of weights, and every other kind of cache beside the smallest weights.
SMOLLM2_ROWS = [
    *((weights, FLOAT32) for weights in WEIGHTS),
    *((WEIGHTS[-1], cache) for cache in smollm2.CACHES if cache != FLOAT32),
]


class _CommandError(Exception):
    pass


def compare_smollm2(text: str, rounds: int) -> None:
    """Print SmolLM2's perplexity of a text, its speed and its memory in every precision."""
    weights, tokenizer = smollm2.load(fetch(SMOLLM2))
    tokens = tokenizer.encode(text)[:MAX_TOKENS]
    if len(tokens) <= ANSWER:
        raise _CommandError(f"the text has {len(tokens)} tokens, expected more than {ANSWER}")
    prompt, answer = tokens[:-ANSWER][-PROMPT:], [[token] for token in tokens[-ANSWER:]]
    start = len(tokens) - ANSWER - len(prompt)
    resident = {row: _resident_alone(row, tokens) for row in SMOLLM2_ROWS}
    steps = {row: smollm2.with_tileattn(weights, *row) for row in SMOLLM2_ROWS}
    perplexities = {row: step.perplexity(tokens) for row, step in steps.items()}
    turns: dict[tuple[str, tuple[str, str]], Turn] = {}
    for row, step in steps.items():
        turns["prompt", row] = smollm2.timed_steps(step, start, [prompt])
        turns["answer", row] = smollm2.timed_steps(step, start + len(prompt), answer)
    seconds = interleave(turns, rounds)

    first = SMOLLM2_ROWS[0]
    print(f"{len(tokens)} tokens. Perplexity: {perplexities[first]:.4f} in float32, then relative.")
    print(
        f"Tokens a second, and times float32's in {rounds} rounds: of {len(prompt)} behind {start}"
    )
    print(
        f"at once, and of the last {ANSWER} one by one. Megabytes: of the blocks' weights, of the"
    )
    print("text's cache, and of all that a process of its own holds but files' pages.")
    print()
    print(f"{'weights':10}{'cache':10}{'perplexity':>10}  {'prompt':>14}  {'answer':>14}"
          f"  {'weights':>8}{'cache':>7}{'resident':>10}")  # fmt: skip
    for row, step in steps.items():
        line = f"{row[0]:10}{row[1]:10}{perplexities[row] / perplexities[first] - 1:+10.3%}"
        for part, count in (("prompt", len(prompt)), ("answer", ANSWER)):
            speed = count / statistics.median(seconds[part, row])
            gain = ratio(seconds[part, first], seconds[part, row]).median
            line += f"  {speed:7.1f}  {gain:4.2f}x"
        blocks = sum(attention.block.nbytes for attention in step.attentions)
        caches = sum(attention.cache.nbytes for attention in step.attentions)
        caches = caches * len(tokens) // weights.config.context
        print(f"{line}  {blocks / 1e6:8.1f}{caches / 1e6:7.1f}{resident[row] / 1e6:10.1f}")


def _resident_alone(row: tuple[str, str], tokens: Sequence[int]) -> int:
    """Bytes that a new process holds once it has read the tokens."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_resident_after, row, tokens).result()


def _resident_after(row: tuple[str, str], tokens: Sequence[int]) -> int:
    weights, _ = smollm2.load(fetch(SMOLLM2))
    step = smollm2.with_tileattn(weights, *row)
    step(tokens)
    (kilobytes,) = re.findall(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def compare_minilm(text: str, rounds: int) -> None:
    """Print how exact MiniLM's embeddings of a text are in every precision, and how fast."""
    passages = [passage.text for passage in split_passages(text, "")][:MAX_PASSAGES]
    if not passages:
        raise _CommandError("the text is empty")
    models = {weights: MiniLM(fetch(MINILM), weights=weights) for weights in WEIGHTS}
    embeddings = {weights: model.encode(passages) for weights, model in models.items()}

    def timed(model: MiniLM) -> Turn:
        def turn() -> float:
            start = time.perf_counter()
            model.encode(passages)
            return time.perf_counter() - start

        return turn

    seconds = interleave({weights: timed(model) for weights, model in models.items()}, rounds)

    print(f"{len(passages)} passages; {rounds} rounds. The least cosine to float32's embedding,")
    print("passages a second, how many times float32's, megabytes of the blocks' weights.")
    print()
    print(f"{'weights':10}{'cosine':>10}  {'passages':>14}  {'weights':>8}")
    for weights, model in models.items():
        cosine = (embeddings[weights] * embeddings[FLOAT32]).sum(axis=1).min()
        speed = len(passages) / statistics.median(seconds[weights])
        gain = ratio(seconds[FLOAT32], seconds[weights]).median
        blocks = sum(layer.attention.nbytes for layer in model.layers)
        print(f"{weights:10}{cosine:10.6f}  {speed:7.1f}  {gain:4.2f}x  {blocks / 1e6:8.1f}")


COMPARISONS = {"smollm2": compare_smollm2, "minilm": compare_minilm}


def _run(options: argparse.Namespace) -> None:
    if options.rounds < 1:
        raise _CommandError(f"--rounds is {options.rounds}, expected at least 1")
    try:
        text = options.text.read_text("utf-8")
    except UnicodeDecodeError:
        raise _CommandError(f"{options.text}: is not UTF-8 text") from None
    except OSError as error:
        raise _CommandError(f"{options.text}: {error.strerror}") from None
    COMPARISONS[options.model](text, options.rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models.precisions",
        description="Measure a model with attention's weights and cache in fewer bits.",
    )
    parser.add_argument("model", choices=COMPARISONS)
    parser.add_argument("--text", type=Path, metavar="FILE", default=README,
                        help="UTF-8 text to read (default: this project's README.md)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, help="of measurement (default: 5)")
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except (_CommandError, FetchError, WeightsError, ImportError) as error:
        print(f"precisions: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
