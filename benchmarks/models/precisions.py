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
from typing import Any

from benchmarks.models import WEIGHTS, record, smollm2
from benchmarks.models.fetch import MINILM, SMOLLM2, FetchError, fetch
from benchmarks.models.minilm import MiniLM, split_passages
from tileattn._command import CommandError, check_output
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


def compare_smollm2(text: str, rounds: int) -> dict[str, Any]:
    """SmolLM2's perplexity of a text, its speed and its memory in every precision."""
    weights, tokenizer = smollm2.load(fetch(SMOLLM2))
    tokens = tokenizer.encode(text)[:MAX_TOKENS]
    if len(tokens) <= ANSWER:
        raise CommandError(f"the text has {len(tokens)} tokens, expected more than {ANSWER}")
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
    return {
        "tokens": {"all": len(tokens), "prompt": len(prompt), "answer": ANSWER},
        "rows": [
            {
                "weights": row[0],
                "cache": row[1],
                "perplexity": perplexities[row],
                "prompt": seconds["prompt", row],
                "answer": seconds["answer", row],
                "weight_bytes": sum(attention.block.nbytes for attention in step.attentions),
                "cache_bytes": sum(attention.cache.nbytes for attention in step.attentions)
                * len(tokens)
                // weights.config.context,
                "resident_bytes": resident[row],
            }
            for row, step in steps.items()
        ],
    }


def print_smollm2(figures: dict[str, Any]) -> None:
    tokens, rows = figures["tokens"], figures["rows"]
    first, rounds = rows[0], len(rows[0]["prompt"])
    start = tokens["all"] - tokens["prompt"] - tokens["answer"]
    print(
        f"{tokens['all']} tokens. Perplexity: {first['perplexity']:.4f} in float32, then relative."
    )
    print(
        f"Tokens a second, and times float32's in {rounds} rounds: of {tokens['prompt']} behind "
        f"{start}"
    )
    print(
        f"at once, and of the last {tokens['answer']} one by one. Megabytes: of the blocks' "
        "weights, of the"
    )
    print("text's cache, and of all that a process of its own holds but files' pages.")
    print()
    print(f"{'weights':10}{'cache':10}{'perplexity':>10}  {'prompt':>14}  {'answer':>14}"
          f"  {'weights':>8}{'cache':>7}{'resident':>10}")  # fmt: skip
    for row in rows:
        line = f"{row['weights']:10}{row['cache']:10}"
        line += f"{row['perplexity'] / first['perplexity'] - 1:+10.3%}"
        for part in ("prompt", "answer"):
            speed = tokens[part] / statistics.median(row[part])
            gain = ratio(first[part], row[part]).median
            line += f"  {speed:7.1f}  {gain:4.2f}x"
        megabytes = (row[f"{name}_bytes"] / 1e6 for name in ("weight", "cache", "resident"))
        print(line + "  {:8.1f}{:7.1f}{:10.1f}".format(*megabytes))


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


def compare_minilm(text: str, rounds: int) -> dict[str, Any]:
    """How exact MiniLM's embeddings of a text are in every precision, and how fast."""
    passages = [passage.text for passage in split_passages(text, "")][:MAX_PASSAGES]
    if not passages:
        raise CommandError("the text is empty")
    models = {weights: MiniLM(fetch(MINILM), weights=weights) for weights in WEIGHTS}
    embeddings = {weights: model.encode(passages) for weights, model in models.items()}

    def timed(model: MiniLM) -> Turn:
        def turn() -> float:
            start = time.perf_counter()
            model.encode(passages)
            return time.perf_counter() - start

        return turn

    seconds = interleave({weights: timed(model) for weights, model in models.items()}, rounds)
    return {
        "passages": len(passages),
        "rows": [
            {
                "weights": weights,
                "cosine": float((embeddings[weights] * embeddings[FLOAT32]).sum(axis=1).min()),
                "seconds": seconds[weights],
                "weight_bytes": sum(layer.attention.nbytes for layer in model.layers),
            }
            for weights, model in models.items()
        ],
    }


def print_minilm(figures: dict[str, Any]) -> None:
    passages, rows = figures["passages"], figures["rows"]
    first = rows[0]
    print(f"{passages} passages; {len(first['seconds'])} rounds. The least cosine to float32's")
    print(
        "embedding, passages a second, how many times float32's, megabytes of the blocks' weights."
    )
    print()
    print(f"{'weights':10}{'cosine':>10}  {'passages':>14}  {'weights':>8}")
    for row in rows:
        speed = passages / statistics.median(row["seconds"])
        gain = ratio(first["seconds"], row["seconds"]).median
        print(
            f"{row['weights']:10}{row['cosine']:10.6f}  {speed:7.1f}  {gain:4.2f}x  "
            f"{row['weight_bytes'] / 1e6:8.1f}"
        )


COMPARISONS = {
    "smollm2": (compare_smollm2, print_smollm2),
    "minilm": (compare_minilm, print_minilm),
}


def _run(options: argparse.Namespace) -> None:
    if options.rounds < 1:
        raise CommandError(f"--rounds is {options.rounds}, expected at least 1")
    if options.json:
        check_output("--json", options.json)
    try:
        text = options.text.read_text("utf-8")
    except UnicodeDecodeError:
        raise CommandError(f"{options.text}: is not UTF-8 text") from None
    except OSError as error:
        raise CommandError(f"{options.text}: {error.strerror}") from None
    compare, print_table = COMPARISONS[options.model]
    figures = compare(text, options.rounds)
    print_table(figures)
    if options.json:
        record.save(options.json, "benchmarks.models.precisions", figures)


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
    parser.add_argument("--json", metavar="FILE", help="write what was measured there")
    options = parser.parse_args(arguments)
    try:
        _run(options)
    except (CommandError, FetchError, WeightsError, ImportError) as error:
        print(f"precisions: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
